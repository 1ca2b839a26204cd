"""Moving arrays to and from the device under test, and looking into the blocks of a cache there.

The suite speaks numpy; what differs between backends is in the classes of this file alone.
"""
import numpy as np
import pytest

from . import dtypes


class HostArrays:
    """The host backend works on numpy arrays where they are."""

    def put(self, array):
        """An array of the device with these contents, as the library takes it."""
        return np.ascontiguousarray(array)

    def get(self, array):
        """The contents of such an array."""
        return np.asarray(array)

    def get_table(self, table):
        """The contents of a device_* table of a batch."""
        return np.asarray(table)

    def get_address(self, table):
        return table.ctypes.data

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def wait(self):
        """Until all that was queued is over."""

    def read_blocks(self, cache):
        """A copy of all blocks: uint8 [num_blocks, block_bytes]."""
        return np.array(np.asarray(cache), copy=True)

    def write_blocks(self, cache, memory):
        np.asarray(cache)[:] = memory

    def fill_blocks(self, cache, byte):
        np.asarray(cache)[:] = byte


class CudaArrays:
    """CuPy arrays of the bits: 16-bit formats that numpy lacks travel as uint16, 8-bit ones as uint8."""

    def __init__(self):
        self.cupy = pytest.importorskip("cupy", reason="the CUDA conformance tests move arrays with CuPy")

    def put(self, array):
        return self.cupy.asarray(np.ascontiguousarray(array))

    def get(self, array):
        return self.cupy.asnumpy(array)

    def get_table(self, table):
        """By __cuda_array_interface__ and by DLPack, which agree."""
        if 0 in table.shape:
            return np.empty(table.shape, table.dtype)  # it may have no memory
        values, same = (self.cupy.asnumpy(take(table)) for take in (self.cupy.asarray, self.cupy.from_dlpack))
        assert values.dtype == same.dtype
        np.testing.assert_array_equal(values, same)
        return values

    def get_address(self, table):
        return table.ptr

    def empty(self, shape, dtype):
        return self.cupy.empty(shape, dtype)

    def wait(self):
        self.cupy.cuda.runtime.deviceSynchronize()

    def _memory(self, cache):
        """uint8 [num_blocks, block_bytes], no copy. What the library does on streams of its own is over."""
        self.wait()
        return self.cupy.asarray(cache)

    def read_blocks(self, cache):
        return self.cupy.asnumpy(self._memory(cache))

    def write_blocks(self, cache, memory):
        self._memory(cache)[:] = self.cupy.asarray(memory)
        self.wait()  # the library knows nothing of this work

    def fill_blocks(self, cache, byte):
        self._memory(cache)[:] = byte
        self.wait()


ARRAYS = {"host": HostArrays, "cuda": CudaArrays}


def for_device(device):
    return ARRAYS[device.split(":")[0]]()


def align(value, unit):
    return -(-value // unit) * unit


class BlockFormat:
    """Where things stand in a block, from the documented format: [layer][K | V] planes of [token][head][dim] or
    [head][token][dim], each at a multiple of 16 bytes; scales per token and head behind them in the same order."""

    def __init__(self, *, num_layers, num_kv_heads, head_dim, dtype, block_size, v_head_dim=None, order="token_head",
                 kv_scales="static"):
        self.num_layers, self.num_kv_heads, self.block_size = num_layers, num_kv_heads, block_size
        self.dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        self.dtype, self.order, self.kv_scales = dtype, order, kv_scales
        self.storage = np.dtype(dtypes.STORAGE[dtype])
        self.offsets, end = [], 0
        for _ in range(num_layers):
            planes = []
            for dim in self.dims:
                end = align(end, 16)
                planes.append(end)
                end += block_size * num_kv_heads * dim * self.storage.itemsize
            self.offsets.append(planes)
        self.scale_offsets = []
        if kv_scales == "token_head":
            end = align(end, 16)
            for _ in range(num_layers):
                planes = []
                for _ in self.dims:
                    planes.append(end)
                    end += block_size * num_kv_heads * 4
                self.scale_offsets.append(planes)
        self.block_bytes = align(end, 256)

    def _view(self, memory, offset, dtype, dim):
        """[num_blocks, token, head(, dim)] whatever the order."""
        inner = (dim,) if dim else ()
        shape = (self.block_size, self.num_kv_heads) if self.order == "token_head" else \
            (self.num_kv_heads, self.block_size)
        view = np.ndarray((memory.shape[0],) + shape + inner, dtype, memory.data, offset,
                          (memory.shape[1],) + tuple(np.empty(shape + inner, dtype).strides))
        return view if self.order == "token_head" else np.swapaxes(view, 1, 2)

    def planes(self, memory, layer):
        """Views of K and V, the bits: [num_blocks, block_size, num_kv_heads, dim]."""
        return tuple(self._view(memory, offset, self.storage, dim)
                     for offset, dim in zip(self.offsets[layer], self.dims))

    def scales(self, memory, layer):
        """Views of the scales of K and V: float32 [num_blocks, block_size, num_kv_heads]."""
        return tuple(self._view(memory, offset, np.dtype(np.float32), None) for offset in self.scale_offsets[layer])

    def poison(self, memory, held):
        """Fills every slot that holds no token with NaN. held: {block: tokens in it}; absent blocks hold none."""
        byte = dtypes.POISON[self.dtype]
        is_kept = np.zeros(memory.shape[0], bool)
        is_kept[list(held)] = True
        memory[~is_kept] = byte
        for block, count in held.items():
            if count == self.block_size:
                continue
            for layer in range(self.num_layers):
                for plane in self.planes(memory, layer):
                    plane[block, count:] = np.frombuffer(bytes([byte]) * self.storage.itemsize, self.storage)[0]
                if self.scale_offsets:
                    for plane in self.scales(memory, layer):
                        plane[block, count:] = np.frombuffer(bytes([byte]) * 4, np.float32)[0]
