# cython: language_level=3, binding=True
"""The kernels: write_kv and attend (methods of Cache), merge_states, and the settings of the host's kernels."""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

import numpy

from pagedkv._arrays cimport as_double, as_int32, as_int64, as_positive, as_stream, as_text, describe
from pagedkv._batch cimport Batch
from pagedkv._cache cimport Cache
from pagedkv._devices cimport find_shard
from pagedkv._errors import BusyError, InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv._tensors cimport DEVICE_CUDA, DEVICE_HOST, TensorView, as_tensor
from pagedkv.abi cimport (
    PKV_BFLOAT16, PKV_BOOL, PKV_DTYPE_NONE, PKV_FLOAT16, PKV_FLOAT32, PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT8,
    PKV_OFF, PKV_ON, pkv_attend, pkv_attend_options, pkv_cache_set_kv_scales, pkv_dtype, pkv_dtype_name,
    pkv_gather_shard_kv, pkv_host_isa, pkv_host_num_threads, pkv_host_set_isa, pkv_host_set_num_threads,
    pkv_merge_states, pkv_rope, pkv_scatter_shard_kv, pkv_status, pkv_stream, pkv_tensor, pkv_write_kv,
    pkv_write_options)


cdef TensorView NO_VIEW = TensorView.__new__(TensorView)  # of an array that is yet to be made


cdef int require_device(TensorView view, bint is_host, str name) except -1:
    if view.device == (DEVICE_CUDA if is_host else DEVICE_HOST):
        raise InvalidArgumentError(f"{name} is in {'CUDA' if is_host else 'host'} memory, but the call works on "
                                   f"{'the host' if is_host else 'a CUDA device'}")
    return 0


cdef pkv_dtype find_byte_dtype(Cache cache) noexcept:
    # What uint8 stands for: the cache's own float8.
    cdef pkv_dtype dtype = cache.layout._group.dtype
    return dtype if dtype == PKV_FLOAT8_E4M3 or dtype == PKV_FLOAT8_E5M2 else PKV_DTYPE_NONE


cdef int enter_kernel(Cache cache, object batch) except -1:
    # Kernels run beside a mutation of the cache, but not beside a prepare of their batch.
    cache.require_open()
    if not isinstance(batch, Batch):
        raise InvalidArgumentError(f"batch must be a Batch, got {describe(batch)}")
    (<Batch> batch).require_open()
    if (<Batch> batch)._cache is not cache:
        raise InvalidArgumentError("batch belongs to another cache")
    if cache.root()._is_resizing:
        raise BusyError("the cache is being resized by another thread")
    return (<Batch> batch).require_still()


cdef class Rope:
    """Rope(base=10000.0, rotary_dim=None, interleaved=False, cos_sin=None)\n--\n\n\
Rotary position embedding for write_kv, which rotates K at each token's position before it is stored.

    The first rotary_dim dims of a head (None: all) are turned in pairs, pair i at position p by the angle
    p * base ** (-2 * i / rotary_dim). Pairs are i and i + rotary_dim / 2, or with interleaved 2i and 2i + 1. cos_sin,
    float32 [max_positions, rotary_dim] on the cache's device, gives the angles in place of base: of each position the
    cosines of its pairs, then the sines."""

    def __init__(self, base=10000.0, rotary_dim=None, interleaved=False, cos_sin=None):
        cdef pkv_rope rope
        memset(&rope, 0, sizeof(rope))
        rope.struct_size = sizeof(rope)
        rope.base = as_float(base, "base")
        if rope.base < 0:
            raise InvalidArgumentError(f"base must be positive, got {base!r}")
        if rotary_dim is not None:
            as_positive(rotary_dim, "rotary_dim")
            rope.rotary_dim = as_int32(rotary_dim, "rotary_dim")
        rope.interleaved = PKV_ON if interleaved else PKV_OFF
        self._table = as_tensor(cos_sin, "cos_sin", PKV_DTYPE_NONE, False) if cos_sin is not None else None
        rope.cos_sin = &self._table.tensor if self._table is not None else NULL
        self._rope = rope
        self.base, self.cos_sin = base, cos_sin
        self.rotary_dim, self.interleaved = rotary_dim, bool(interleaved)

    def __repr__(self):
        angles = f"base={self.base!r}" if self.cos_sin is None else "cos_sin=..."
        return f"pagedkv.Rope({angles}, rotary_dim={self.rotary_dim!r}, interleaved={self.interleaved!r})"


cdef int write_kv(Cache cache, object layer, object batch, object k, object v, object stream, object rope,
                  object pdl, object shard) except -1:
    cdef pkv_write_options options
    cdef pkv_rope rotation
    cdef pkv_status status
    cdef int32_t index = as_int32(layer, "layer")
    cdef TensorView keys, values, table = None
    cdef pkv_dtype byte_dtype
    cdef Batch step, root_step
    cdef Cache root
    enter_kernel(cache, batch)
    memset(&options, 0, sizeof(options))
    options.struct_size = sizeof(options)
    as_stream(stream, &options.stream)
    options.pdl = PKV_ON if pdl else PKV_OFF
    if rope is not None:
        if not isinstance(rope, Rope) or (<Rope> rope)._rope.struct_size == 0:
            raise InvalidArgumentError(f"rope must be a pagedkv.Rope, got {describe(rope)}")
        rotation, table = (<Rope> rope)._rope, (<Rope> rope)._table  # what an __init__ meanwhile does not change
        if table is not None:
            require_device(table, cache._is_host, "cos_sin")
        options.rope = &rotation
    byte_dtype = find_byte_dtype(cache)
    keys = as_tensor(k, "k", byte_dtype, False)
    values = as_tensor(v, "v", byte_dtype, False)
    require_device(keys, cache._is_host, "k")
    require_device(values, cache._is_host, "v")
    options.device_index = find_shard(cache, shard, index, keys, "k")
    enter_kernel(cache, batch)  # again: reading arrays may have run Python code
    step = <Batch> batch
    root, root_step = cache.root(), step.root()
    root._num_kernels += 1
    root_step._num_kernels += 1
    with nogil:
        status = pkv_write_kv(cache._cache, index, step._batch, &keys.tensor, &values.tensor, &options)
    root._num_kernels -= 1
    root_step._num_kernels -= 1
    return check(status)


cdef object empty_like(TensorView view, object value, tuple shape):
    # numpy's zeros of the dtype that `value` has, or of its bits.
    if isinstance(value, numpy.ndarray):
        return numpy.zeros(shape, value.dtype)
    if view.tensor.dtype == PKV_FLOAT32:
        return numpy.zeros(shape, numpy.float32)
    if view.tensor.dtype == PKV_FLOAT16:
        return numpy.zeros(shape, numpy.float16)
    if view.tensor.dtype == PKV_BFLOAT16:
        return numpy.zeros(shape, numpy.uint16)
    raise InvalidArgumentError(f"attention is computed in float32, float16 or bfloat16, got "
                               f"{pkv_dtype_name(view.tensor.dtype).decode()}")


cdef object empty_rows(Cache cache, int64_t count, object num_heads, int dim):
    # numpy rows of the cache's own dtype, or of its bits.
    cdef pkv_dtype dtype = cache.layout._group.dtype
    kind = numpy.uint8
    if dtype == PKV_FLOAT32:
        kind = numpy.float32
    elif dtype == PKV_FLOAT16:
        kind = numpy.float16
    elif dtype == PKV_BFLOAT16:
        kind = numpy.uint16
    elif dtype == PKV_INT8:
        kind = numpy.int8
    return numpy.zeros((count, num_heads, dim), kind)


cdef object move_rows(Cache cache, object layer, object batch, object index, object start, object count, object k,
                      object v, object stream, bint is_gathered, object shard):
    # gather_kv, or with count None scatter_kv, where k says how many rows there are.
    cdef pkv_stream handle = NULL
    cdef pkv_status status
    cdef int32_t layer_index = as_int32(layer, "layer"), device = -1
    cdef int64_t place = as_int64(index, "index"), first = as_int64(start, "start"), num_rows = 0
    cdef TensorView keys, values
    cdef pkv_dtype byte_dtype
    cdef Batch step, root_step
    cdef Cache root
    enter_kernel(cache, batch)
    as_stream(stream, &handle)
    if is_gathered:
        num_rows = as_int64(count, "count")
        if k is None and v is None:
            if not cache._is_host:
                raise InvalidArgumentError(f"k and v must be given on {cache.device}: a launch allocates nothing")
            # Too many to be right are refused below before they are made.
            if 0 <= num_rows <= as_int64(cache._num_blocks, "num_blocks") * cache.layout.block_size:
                device = find_shard(cache, shard, layer_index, NO_VIEW, "k")
                num_heads = cache.shards[device]["num_kv_heads"]
                k = empty_rows(cache, num_rows, num_heads, cache.layout.head_dim)
                v = empty_rows(cache, num_rows, num_heads, cache.layout.v_head_dim)
            else:
                raise InvalidArgumentError(f"count is {num_rows}, which no sequence of the cache has")
        elif k is None or v is None:
            raise InvalidArgumentError("k and v must both be given, or neither")
    byte_dtype = find_byte_dtype(cache)
    keys = as_tensor(k, "k", byte_dtype, is_gathered)
    values = as_tensor(v, "v", byte_dtype, is_gathered)
    require_device(keys, cache._is_host, "k")
    require_device(values, cache._is_host, "v")
    if device < 0:
        device = find_shard(cache, shard, layer_index, keys, "k")
    if not is_gathered:
        num_rows = keys.tensor.shape[0]
    enter_kernel(cache, batch)  # again: reading arrays may have run Python code
    step = <Batch> batch
    root, root_step = cache.root(), step.root()
    root._num_kernels += 1
    root_step._num_kernels += 1
    with nogil:
        if is_gathered:
            status = pkv_gather_shard_kv(cache._cache, device, layer_index, step._batch, place, first, num_rows,
                                         &keys.tensor, &values.tensor, handle)
        else:
            status = pkv_scatter_shard_kv(cache._cache, device, layer_index, step._batch, place, first, num_rows,
                                          &keys.tensor, &values.tensor, handle)
    root._num_kernels -= 1
    root_step._num_kernels -= 1
    check(status)
    return k, v


cdef float as_float(object value, str name) except? -1.0:
    # A number that float32 holds, other than 0, which the C library takes for its default.
    cdef float result = <float> as_double(value, name)
    if result == 0 or not isfinite(result):
        raise InvalidArgumentError(f"{name} must be finite and not zero, got {value!r}")
    return result


cdef TensorView as_optional(object value, str name, bint is_host, bint is_written,
                            pkv_dtype byte_dtype=PKV_DTYPE_NONE):
    cdef TensorView view
    if value is None:
        return None
    view = as_tensor(value, name, byte_dtype, is_written)
    require_device(view, is_host, name)
    return view


cdef object attend(Cache cache, object layer, object batch, object q, object out, object stream, object scale,
                   object causal, object window, object softcap, object sinks, object alibi_slopes, object tree_mask,
                   object lse, object invariant, object pdl, object shard):
    cdef pkv_attend_options options
    cdef pkv_status status
    cdef int32_t index = as_int32(layer, "layer")
    cdef TensorView query, result, sink_view, slope_view, lse_view, mask_view
    cdef Batch step, root_step
    cdef Cache root
    enter_kernel(cache, batch)
    memset(&options, 0, sizeof(options))
    options.struct_size = sizeof(options)
    as_stream(stream, &options.stream)
    options.causal = PKV_ON if causal else PKV_OFF
    options.invariant = PKV_ON if invariant else PKV_OFF
    options.pdl = PKV_ON if pdl else PKV_OFF
    if scale is not None:
        options.scale = as_float(scale, "scale")
    if window is not None:
        options.window = as_int64(window, "window")
        if options.window <= 0:
            raise InvalidArgumentError(f"window must be at least 1 or None, got {window}")
    if softcap is not None:
        options.softcap = as_float(softcap, "softcap")
        if options.softcap < 0:
            raise InvalidArgumentError(f"softcap must be positive or None, got {softcap!r}")
    query = as_tensor(q, "q", PKV_DTYPE_NONE, False)
    require_device(query, cache._is_host, "q")
    options.device_index = find_shard(cache, shard, index, query, "q")
    if out is None:
        if not cache._is_host:
            raise InvalidArgumentError(f"out must be given on {cache.device}: a launch allocates nothing")
        if query.tensor.ndim != 3:
            raise InvalidArgumentError("q must be [num_tokens, num_heads, head_dim], got "
                                       f"{query.tensor.ndim} dimensions")
        out = empty_like(query, q, (query.tensor.shape[0], query.tensor.shape[1], cache.layout.v_head_dim))
    result = as_tensor(out, "out", PKV_DTYPE_NONE, True)
    require_device(result, cache._is_host, "out")
    sink_view = as_optional(sinks, "sinks", cache._is_host, False)
    slope_view = as_optional(alibi_slopes, "alibi_slopes", cache._is_host, False)
    lse_view = as_optional(lse, "lse", cache._is_host, True)
    mask_view = as_optional(tree_mask, "tree_mask", cache._is_host, False, PKV_BOOL)
    options.sinks = &sink_view.tensor if sink_view is not None else NULL
    options.alibi_slopes = &slope_view.tensor if slope_view is not None else NULL
    options.lse = &lse_view.tensor if lse_view is not None else NULL
    options.tree_mask = &mask_view.tensor if mask_view is not None else NULL
    enter_kernel(cache, batch)  # again: reading arrays may have run Python code
    step = <Batch> batch
    root, root_step = cache.root(), step.root()
    root._num_kernels += 1
    root_step._num_kernels += 1
    with nogil:
        status = pkv_attend(cache._cache, index, step._batch, &query.tensor, &result.tensor, &options)
    root._num_kernels -= 1
    root_step._num_kernels -= 1
    check(status)
    return out


def merge_states(out_a, lse_a, out_b, lse_b, out=None, lse=None, stream=0):
    """Combines attention over two disjoint sets of keys; returns (out, lse).

    out_*: [num_tokens, num_heads, dim] of one dtype; lse_*: float32 [num_tokens, num_heads]. out and lse may be one of
    the inputs. On the host they are made where they are not given; on CUDA out must be given, and without lse none is
    returned."""
    cdef pkv_stream handle = NULL
    cdef pkv_status status
    cdef TensorView a, b, result, a_lse, b_lse, lse_view = None
    cdef pkv_tensor *lse_tensor = NULL
    cdef bytes device = b"host"
    cdef const char *name
    cdef bint is_host = True
    as_stream(stream, &handle)
    a = as_tensor(out_a, "out_a", PKV_DTYPE_NONE, False)
    a_lse = as_tensor(lse_a, "lse_a", PKV_DTYPE_NONE, False)
    b = as_tensor(out_b, "out_b", PKV_DTYPE_NONE, False)
    b_lse = as_tensor(lse_b, "lse_b", PKV_DTYPE_NONE, False)
    for view in (a, a_lse, b, b_lse):
        if (<TensorView> view).device == DEVICE_CUDA:
            is_host = False
            device = f"cuda:{(<TensorView> view).ordinal}".encode()
    require_device(a, is_host, "out_a")
    require_device(a_lse, is_host, "lse_a")
    require_device(b, is_host, "out_b")
    require_device(b_lse, is_host, "lse_b")
    if out is None:
        if not is_host:
            raise InvalidArgumentError("out must be given on CUDA: a launch allocates nothing")
        out = empty_like(a, out_a, tuple([a.tensor.shape[i] for i in range(a.tensor.ndim)]))
    if lse is None and is_host:
        lse = numpy.zeros(tuple([a_lse.tensor.shape[i] for i in range(a_lse.tensor.ndim)]), numpy.float32)
    result = as_tensor(out, "out", PKV_DTYPE_NONE, True)
    require_device(result, is_host, "out")
    lse_view = as_optional(lse, "lse", is_host, True)
    if lse_view is not None:
        lse_tensor = &lse_view.tensor
    name = device
    with nogil:
        status = pkv_merge_states(name, &a.tensor, &a_lse.tensor, &b.tensor, &b_lse.tensor, &result.tensor, lse_tensor,
                                  handle)
    check(status)
    return out, lse


# ---- Settings of the host's kernels, for the whole process


def set_num_threads(n):
    """Threads of the host kernels; 0: one for each processor that the process may use."""
    check(pkv_host_set_num_threads(as_int32(n, "n")))


def num_threads():
    """Threads of the host kernels."""
    return pkv_host_num_threads()


def set_isa(name):
    """Instruction set of the host kernels: "auto", "reference", "scalar", "avx2", "avx512", "avx512bf16",
    "amx" or "neon"."""
    cdef bytes text = as_text(name, "isa")
    check(pkv_host_set_isa(text))


def isa():
    """Instruction set of the host kernels."""
    return pkv_host_isa().decode()


# ---- Static scales: a method of Cache, which declares it


cdef int read_scales(object value, str name, float *out, int num_heads) except -1:
    # A number for all heads, or num_heads of them.
    cdef int head
    cdef double scale
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes)) and not (
            isinstance(value, numpy.ndarray) and value.ndim == 0):
        try:
            array = numpy.asarray(value)
        except Exception as error:
            raise InvalidArgumentError(f"{name} must be a number or an array: {error}") from None
        if array.shape != (num_heads,) or array.dtype.kind not in "fiu":
            raise InvalidArgumentError(f"{name} must be a number or float32 [{num_heads}], got {describe(array)}")
        values = array.tolist()
    else:
        values = [value] * num_heads
    for head in range(num_heads):
        scale = as_double(values[head], name)
        out[head] = <float> scale
    return 0


def set_kv_scales(Cache self, layer, k_scale, v_scale):
    """Static scales of a layer's K and V: numbers, or float32 [num_kv_heads]. Finite and positive."""
    cdef int32_t index = as_int32(layer, "layer")
    cdef int num_heads = self.layout.num_kv_heads
    cdef float *scales
    self.enter()
    if self._num_kernels > 0:
        raise BusyError("set_kv_scales while kernels are running")
    scales = <float *> PyMem_Malloc(2 * num_heads * sizeof(float))
    if scales == NULL:
        raise MemoryError()
    try:
        read_scales(k_scale, "k_scale", scales, num_heads)
        read_scales(v_scale, "v_scale", scales + num_heads, num_heads)
        self.enter()
        check(pkv_cache_set_kv_scales(self._cache, index, scales, scales + num_heads))
    finally:
        PyMem_Free(scales)
