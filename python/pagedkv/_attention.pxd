from pagedkv._cache cimport Cache

# The methods of Cache of the same names.
cdef int write_kv(Cache cache, object layer, object batch, object k, object v, object stream,
                  object rope) except -1
cdef object attend(Cache cache, object layer, object batch, object q, object out, object stream, object scale,
                   object causal, object window, object softcap, object sinks, object alibi_slopes, object tree_mask,
                   object lse)
