from libc.stdint cimport int32_t

from pagedkv._cache cimport Cache
from pagedkv._tensors cimport TensorView
from pagedkv.abi cimport pkv_cache_options, pkv_stream

# Devices of a cache to be made, as C strings: what this returns keeps them alive. device: the argument beside them.
cdef object set_devices(pkv_cache_options *options, object devices, object shard, object device)
# Of a cache whose sequences are shared out: the parts that somebody has, one of them, whether a call is running on any.
cdef list find_live_parts(Cache whole)
cdef Cache make_part(Cache whole, int32_t index)
cdef bint is_any_busy(Cache whole) noexcept
# What each device of a cache holds: a tuple of dicts.
cdef tuple read_shards(Cache cache)
# A stream, or of a cache over several devices a list of them; what this returns is kept alive until the call is over.
cdef object take_streams(Cache cache, object value, pkv_stream *out)
# The index of the device that a kernel runs on: the one given, or else the one that its first array tells.
cdef int32_t find_shard(Cache cache, object shard, int32_t layer, TensorView view, str name) except -1
