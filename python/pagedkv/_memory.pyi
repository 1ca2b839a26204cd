# Sizes as text, for Cache alone: nothing here is for callers.
