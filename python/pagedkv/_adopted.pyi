# Memory of others, for the other modules alone: nothing here is for callers.
