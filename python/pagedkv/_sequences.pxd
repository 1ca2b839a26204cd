from pagedkv._cache cimport Cache

# The methods of Cache of the same names: many sequences in one call of the library, all or none.
cdef list open_many(Cache cache, object prompts, object namespace, object priority, object tag, object salts)
cdef list fork_many(Cache cache, object sequences, object lengths)
cdef int commit_many(Cache cache, object sequences, object tokens) except -1
cdef int truncate_many(Cache cache, object sequences, object lengths) except -1
cdef int close_many(Cache cache, object sequences, object stream) except -1
cdef int reorder(Cache cache, object sequences, object sources) except -1
cdef int accept(Cache cache, object sequences, object num_drafts, object kept, object stream) except -1
