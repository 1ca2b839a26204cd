from pagedkv.abi cimport pkv_layer_group, pkv_layout

cdef class Layout:
    cdef pkv_layer_group _group
    cdef object __weakref__
    cdef readonly int num_layers
    cdef readonly int num_kv_heads
    cdef readonly int head_dim
    cdef readonly int v_head_dim
    cdef readonly str dtype
    cdef readonly int block_size
    cdef readonly str order
    cdef readonly str kv_scales
    cdef readonly object block_bytes
    cdef readonly object token_bytes

    # The C struct, which points into this object.
    cdef void fill(self, pkv_layout *out) noexcept
