"""Where a cache of a test lies, by one name: on a device, or cut over several, as "heads of host:0 host:1"."""
import ctypes

import numpy as np
import pytest

import pagedkv

from . import arrays

SHARDED = ["heads of host:0 host:1", "layers of host:0 host:1", "heads of cuda:0 cuda:0"]


def find_place(name):
    """The arguments of pagedkv.Cache."""
    if " of " not in name:
        return {"device": name}
    shard, devices = name.split(" of ")
    return {"devices": devices.split(), "shard": shard}


def is_sharded(name):
    return " of " in name


@pytest.fixture(scope="session", params=["host", "cuda", *SHARDED])
def device(request):
    """In place of the suite's own, for what has to be the same over several devices."""
    if "cuda" in request.param:
        info = pagedkv.cuda_info()
        if not info["is_usable"]:
            pytest.skip(f"no CUDA: {info['reason']}")
    return request.param


def cut_rows(cache, layer, rows):
    """(index, its heads of rows [..., heads, dim]) of each device that holds the layer."""
    for index, part in enumerate(cache.shards):
        if part["first_layer"] <= layer < part["first_layer"] + part["num_layers"]:
            first = part["first_kv_head"]
            yield index, rows[..., first : first + part["num_kv_heads"], :]


class PlaceArrays:
    """As arrays.for_device() has them; a block is its parts on all devices, one behind the other."""

    def __init__(self, name):
        self.own = arrays.for_device("cuda" if "cuda" in name else "host")

    def __getattr__(self, name):
        return getattr(self.own, name)

    def view_parts(self, cache):
        """uint8 [num_blocks, bytes of the part] of each device, no copy."""
        self.wait()  # what the library does on streams of its own is over
        for part in cache.shards:
            shape = (cache.num_blocks, part["block_bytes"])
            size = shape[0] * shape[1]
            if part["device"].startswith("host"):
                yield np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(part["base_ptr"])).reshape(shape)
            else:
                memory = self.cupy.cuda.UnownedMemory(part["base_ptr"], size, cache)
                yield self.cupy.ndarray(shape, np.uint8, self.cupy.cuda.MemoryPointer(memory, 0))

    def read_blocks(self, cache):
        return np.concatenate([self.get(part) for part in self.view_parts(cache)], axis=1)

    def write_blocks(self, cache, memory):
        first = 0
        for part in self.view_parts(cache):
            part[:] = self.put(memory[:, first : first + part.shape[1]])
            first += part.shape[1]
        self.wait()

    def fill_blocks(self, cache, byte):
        for part in self.view_parts(cache):
            part[:] = byte
        self.wait()


def arrays_at(name):
    return PlaceArrays(name) if is_sharded(name) else arrays.for_device(name)
