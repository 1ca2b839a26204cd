from pagedkv._cache cimport Cache
from pagedkv._tensors cimport TensorView
from pagedkv.abi cimport pkv_rope

cdef class Rope:
    cdef pkv_rope _rope      # cos_sin points into _table; struct_size 0 before __init__
    cdef TensorView _table
    cdef readonly object base
    cdef readonly object rotary_dim
    cdef readonly object interleaved
    cdef readonly object cos_sin

# The methods of Cache of the same names.
cdef int write_kv(Cache cache, object layer, object batch, object k, object v, object stream, object rope,
                  object pdl, object shard) except -1
cdef object move_rows(Cache cache, object layer, object batch, object index, object start, object count, object k,
                      object v, object stream, bint is_gathered, object shard)  # gather_kv and scatter_kv
cdef object attend(Cache cache, object layer, object batch, object q, object out, object stream, object scale,
                   object causal, object window, object softcap, object sinks, object alibi_slopes, object tree_mask,
                   object lse, object invariant, object pdl, object shard)
