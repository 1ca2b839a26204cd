# Methods of Cache, which declares them: nothing here is for callers.
