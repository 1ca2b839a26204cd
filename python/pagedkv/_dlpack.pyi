# Memory given to others by DLPack, for the other modules alone: nothing here is for callers.
