# cython: language_level=3, binding=True
"""The layout of blocks: what stands where in a block."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, uint8_t
from libc.string cimport memset

from pagedkv._arrays cimport as_dtype, as_int32, describe
from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport (
    PKV_HEAD_TOKEN, PKV_SCALES_PER_TOKEN_HEAD, PKV_SCALES_STATIC, PKV_TOKEN_HEAD, pkv_dtype, pkv_dtype_name,
    pkv_kv_order, pkv_kv_scales, pkv_layer_info, pkv_layout_describe, pkv_layout_fingerprint, pkv_layout_info,
    pkv_layout_layer)

cdef dict ORDERS = {"token_head": <int> PKV_TOKEN_HEAD, "head_token": <int> PKV_HEAD_TOKEN}
cdef dict SCALES = {"static": <int> PKV_SCALES_STATIC, "token_head": <int> PKV_SCALES_PER_TOKEN_HEAD}


cdef int choose(dict choices, object value, str name) except -1:
    if isinstance(value, str) and value in choices:
        return choices[value]
    raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {describe(value)}")


cdef int32_t as_size(object value, str name) except -1:
    cdef int32_t result = as_int32(value, name)
    if result <= 0:
        raise InvalidArgumentError(f"{name} must be at least 1, got {result}")
    return result


cdef class Layout:
    """Layout(num_layers, num_kv_heads, head_dim, dtype="bfloat16", block_size=16, v_head_dim=None, \
order="token_head", kv_scales="static")\n--\n\n\
What a block holds: [layer][K | V][token][head][dim] ("token_head") or [layer][K | V][head][token][dim].

    dtype: a name ("bfloat16", "float16", "float32", "float8_e4m3", "float8_e5m2", "int8") or a dtype of numpy,
    ml_dtypes or torch. kv_scales, for float8 and int8: "static" (a scale for each layer and head, set on the cache) or
    "token_head" (found at writing, kept in the block). block_bytes counts everything, padding and scales included;
    token_bytes one token's K and V alone."""

    def __init__(self, num_layers, num_kv_heads, head_dim, dtype="bfloat16", block_size=16, v_head_dim=None,
                 order="token_head", kv_scales="static"):
        cdef pkv_layout layout
        cdef pkv_layout_info info
        cdef pkv_layer_group *group = &self._group
        cdef int32_t tokens = as_size(block_size, "block_size")
        if self.block_bytes is not None:
            raise InvalidArgumentError("the layout was made already")
        memset(group, 0, sizeof(group[0]))
        group.struct_size = sizeof(group[0])
        group.num_layers = as_size(num_layers, "num_layers")
        group.num_kv_heads = as_size(num_kv_heads, "num_kv_heads")
        group.head_dim = as_size(head_dim, "head_dim")
        group.v_head_dim = group.head_dim if v_head_dim is None else as_size(v_head_dim, "v_head_dim")
        group.dtype = <pkv_dtype> as_dtype(dtype)
        group.order = <pkv_kv_order> choose(ORDERS, order, "order")
        group.kv_scales = <pkv_kv_scales> choose(SCALES, kv_scales, "kv_scales")
        self.block_size = tokens
        self.fill(&layout)
        memset(&info, 0, sizeof(info))
        info.struct_size = sizeof(info)
        check(pkv_layout_describe(&layout, &info))
        self.num_layers = group.num_layers
        self.num_kv_heads = group.num_kv_heads
        self.head_dim = group.head_dim
        self.v_head_dim = group.v_head_dim
        self.dtype = pkv_dtype_name(group.dtype).decode()
        self.order = order
        self.kv_scales = kv_scales
        self.token_bytes = info.token_bytes
        self.block_bytes = info.block_bytes

    cdef void fill(self, pkv_layout *out) noexcept:
        memset(out, 0, sizeof(out[0]))
        out.struct_size = sizeof(out[0])
        out.block_size = self.block_size
        out.num_groups = 1
        out.groups = &self._group

    def layer(self, layer):
        """Where a layer's K and V stand in every block: offsets in bytes, strides in elements."""
        cdef pkv_layout layout
        cdef pkv_layer_info info
        cdef int32_t index = as_int32(layer, "layer")
        self.fill(&layout)
        memset(&info, 0, sizeof(info))
        info.struct_size = sizeof(info)
        check(pkv_layout_layer(&layout, index, &info))
        return {
            "k_offset": info.k_offset,
            "v_offset": info.v_offset,
            "k_token_stride": info.k_token_stride,
            "k_head_stride": info.k_head_stride,
            "v_token_stride": info.v_token_stride,
            "v_head_stride": info.v_head_stride,
            "k_scale_offset": info.k_scale_offset,
            "v_scale_offset": info.v_scale_offset,
            "scale_token_stride": info.scale_token_stride,
            "scale_head_stride": info.scale_head_stride,
        }

    def fingerprint(self, model=b""):
        """32 bytes that name the layout and what is stored in it, for peers to compare before they exchange blocks: SHA-256
        over the layout and over `model`, bytes that identify the model. docs/transfers.md has it byte by byte."""
        cdef pkv_layout layout
        cdef uint8_t digest[32]
        cdef bytes name
        if not isinstance(model, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"model must be bytes, got {describe(model)}")
        name = bytes(model)
        self.fill(&layout)
        check(pkv_layout_fingerprint(&layout, PyBytes_AS_STRING(name), <size_t> len(name), digest))
        return PyBytes_FromStringAndSize(<char *> digest, 32)

    def __reduce__(self):
        return type(self), (self.num_layers, self.num_kv_heads, self.head_dim, self.dtype, self.block_size,
                            self.v_head_dim, self.order, self.kv_scales)

    def __eq__(self, other):
        if not isinstance(other, Layout):
            return NotImplemented
        return Layout.__reduce__(self)[1] == Layout.__reduce__(other)[1]

    def __hash__(self):
        return hash(Layout.__reduce__(self)[1])

    def __repr__(self):
        return (f"Layout(num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
                f"dtype={self.dtype!r}, block_size={self.block_size}, v_head_dim={self.v_head_dim}, "
                f"order={self.order!r}, kv_scales={self.kv_scales!r})")
