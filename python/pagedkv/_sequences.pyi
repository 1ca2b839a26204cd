# The methods of Cache that take many sequences, for the other modules alone: nothing here is for callers.
