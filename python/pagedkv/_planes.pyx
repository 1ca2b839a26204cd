# cython: language_level=3, binding=True
"""K and V of a cache as arrays: methods of Cache."""
from libc.stdint cimport int32_t, uintptr_t

from pagedkv._arrays cimport as_int32
from pagedkv._cache cimport Cache
from pagedkv._dlpack cimport make_lease
from pagedkv._errors import UnsupportedError
from pagedkv._views cimport MemoryView, item_bytes_of, make_view


cdef int require_one_device(Cache cache) except -1:
    cache.require_open()
    if cache._num_devices > 1:
        raise UnsupportedError("the cache's memory is on several devices: shards has the address of each part")
    return 0


cdef MemoryView view_plane(Cache cache, object layer, str kind):
    # [num_blocks, two inner dimensions in the order of the layout, dim].
    cdef int32_t index = as_int32(layer, "layer")
    cdef int item_bytes
    layout = cache.layout
    where = layout.layer(index)
    require_one_device(cache)
    item_bytes = item_bytes_of(layout.dtype)
    tokens = (layout.block_size, where[f"{kind}_token_stride"] * item_bytes)
    heads = (layout.num_kv_heads, where[f"{kind}_head_stride"] * item_bytes)
    first, second = (tokens, heads) if layout.order == "token_head" else (heads, tokens)
    dim = layout.head_dim if kind == "k" else layout.v_head_dim
    return make_view(make_lease(cache, &cache._num_views), <uintptr_t> cache._base + where[f"{kind}_offset"],
                     (cache.num_blocks, first[0], second[0], dim), (layout.block_bytes, first[1], second[1], item_bytes),
                     layout.dtype, cache.device)


def k_view(Cache self, layer):
    """K of a layer in all blocks, without a copy: [num_blocks, block_size, num_kv_heads, head_dim], or for the order
    "head_token" [num_blocks, num_kv_heads, block_size, head_dim]. A MemoryView; close() raises BusyError while it lives."""
    return view_plane(self, layer, "k")


def v_view(Cache self, layer):
    """V of a layer in all blocks, as k_view() has K."""
    return view_plane(self, layer, "v")


def block_view(Cache self, block):
    """A block, all layers: uint8 [block_bytes], without a copy; close() raises BusyError while it lives."""
    require_one_device(self)
    address = self.block_ptr(block)
    return make_view(make_lease(self, &self._num_views), address, (self.layout.block_bytes,), (1,), "uint8", self.device)
