from pagedkv._cache cimport Cache

# At most max_events, or all there are for None, as a structured array.
cdef object read_events(Cache cache, object max_events)
