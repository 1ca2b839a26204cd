"""Memory of a cache as arrays of other libraries, and caches over memory of others."""

import ctypes
import gc

import numpy as np
import pytest

import pagedkv

from .arrays import BlockFormat, for_device

CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "float8_e4m3": (10, 8), "float8_e5m2": (12, 8),
         "int8": (0, 8)}
BITS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float8_e4m3": np.uint8,
        "float8_e5m2": np.uint8, "int8": np.int8}


def make(device, dtype="float32", order="token_head", **options):
    shape = dict(num_layers=2, num_kv_heads=3, head_dim=16, v_head_dim=8, dtype=dtype, block_size=4, order=order)
    return pagedkv.Cache(pagedkv.Layout(**shape), num_blocks=5, device=device, **options), BlockFormat(**shape)


def get(device, view):
    """A copy of what a view shows, as numpy."""
    if device == "host":
        return np.array(np.asarray(view), copy=True)
    import cupy

    return cupy.asnumpy(cupy.asarray(view))


@pytest.mark.parametrize("order", ["token_head", "head_token"])
@pytest.mark.parametrize("dtype", list(CODES))
def test_views_show_the_planes(device, dtype, order):
    cache, format = make(device, dtype, order)
    arrays = for_device(device)
    memory = np.random.default_rng(3).integers(0, 256, (5, cache.layout.block_bytes), np.uint8)
    arrays.write_blocks(cache, memory)
    for layer in range(2):
        for view, plane, dim in zip((cache.k_view(layer), cache.v_view(layer)), format.planes(memory, layer), (16, 8)):
            expected = plane if order == "token_head" else plane.swapaxes(1, 2)
            inner = (4, 3) if order == "token_head" else (3, 4)
            assert view.shape == (5, *inner, dim) and view.dtype == dtype and view.device.split(":")[0] == device
            shown = get(device, view)
            assert shown.dtype == BITS[dtype] and shown.tobytes() == np.ascontiguousarray(expected).tobytes()
    for block in range(5):
        np.testing.assert_array_equal(get(device, cache.block_view(block)), memory[block])


def test_what_is_written_is_in_the_view_and_back(device):
    cache, _ = make(device)
    arrays = for_device(device)
    sequence = cache.open([])
    batch = cache.batch(1, 8)
    batch.prepare([sequence], [6])
    k = np.random.default_rng(1).standard_normal((6, 3, 16)).astype(np.float32)
    v = np.random.default_rng(2).standard_normal((6, 3, 8)).astype(np.float32)
    cache.write_kv(1, batch, arrays.put(k), arrays.put(v))
    blocks = list(sequence.blocks)
    np.testing.assert_array_equal(get(device, cache.k_view(1))[blocks].reshape(8, 3, 16)[:6], k)
    np.testing.assert_array_equal(get(device, cache.v_view(1))[blocks].reshape(8, 3, 8)[:6], v)
    if device == "host":
        np.asarray(cache.v_view(1))[blocks[1], 1, 2] = 7
        assert (cache.gather_kv(1, batch, 0, 5, 1)[1][0, 2] == 7).all()


def test_views_hold_what_they_show(device):
    cache, _ = make(device)
    for take in (lambda: cache.k_view(0), lambda: cache.v_view(1), lambda: cache.block_view(2)):
        view = take()
        with pytest.raises(pagedkv.BusyError, match="views"):
            cache.close()
        capsule = view.__dlpack__()
        del view
        gc.collect()
        with pytest.raises(pagedkv.BusyError, match="views"):
            cache.close()
        del capsule
        gc.collect()
    if device == "host":
        array = np.asarray(cache.k_view(0))[1:, 2]
        gc.collect()
        with pytest.raises(pagedkv.BusyError, match="views"):
            cache.close()
        del array
        array = np.from_dlpack(cache.k_view(0))
        gc.collect()
        with pytest.raises(pagedkv.BusyError, match="views"):
            cache.close()
        del array
        gc.collect()
    cache.close()
    for call in (cache.k_view, cache.v_view, cache.block_view):
        with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
            call(0)


def test_a_view_outlives_the_names_of_its_cache():
    array = np.asarray(make("host")[0].k_view(0))
    gc.collect()
    array[:] = 3
    assert (array == 3).all()


def test_dlpack_has_the_true_dtype(device):
    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                    ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                    ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                    ("byte_offset", ctypes.c_uint64)]

    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    for dtype, (code, bits) in CODES.items():
        cache, _ = make(device, dtype)
        view = cache.v_view(1)
        capsule = view.__dlpack__()
        tensor = Tensor.from_address(get_pointer(capsule, b"dltensor"))
        assert (tensor.code, tensor.bits, tensor.lanes, tensor.ndim) == (code, bits, 1, 4)
        assert tuple(tensor.shape[:4]) == view.shape
        assert tuple(stride * bits // 8 for stride in tensor.strides[:4]) == view.strides
        assert tensor.data + tensor.byte_offset == view.ptr
        assert (tensor.device_type, tensor.device_id) == view.__dlpack_device__() == ((1, 0) if device == "host" else (2, 0))
        if device == "cuda":
            interface = view.__cuda_array_interface__
            assert interface["data"] == (view.ptr, False) and interface["shape"] == view.shape


def test_views_of_pools(device):
    pool = pagedkv.Pool(512, 4, device=device)
    view = pool.block_view(3)
    assert (view.ptr, view.shape, view.dtype) == (pool.block_ptr(3), (512,), "uint8")
    for call in (pool.close, lambda: pool.resize(8)):
        with pytest.raises(pagedkv.BusyError, match="views"):
            call()
    del view
    gc.collect()
    pool.close()


@pytest.mark.parametrize("call, text", [
    (lambda cache: cache.k_view(2), "layer is 2"), (lambda cache: cache.v_view(-1), "layer is -1"),
    (lambda cache: cache.k_view("0"), "layer"), (lambda cache: cache.block_view(5), "block is 5"),
    (lambda cache: cache.block_view(None), "block"),
])
def test_bad_arguments(call, text):
    cache, _ = make("host")
    with pytest.raises(pagedkv.InvalidArgumentError, match=text):
        call(cache)
    cache.close()  # nothing is left behind


def test_what_a_view_is_not():
    cache, _ = make("host")
    view = cache.k_view(0)
    with pytest.raises(TypeError):
        pagedkv.MemoryView()
    with pytest.raises(TypeError):
        view.__reduce__()
    assert not hasattr(view, "__cuda_array_interface__")
    assert repr(view) == "<pagedkv.MemoryView float32 [5, 4, 3, 16] on host>"
    with pytest.raises(TypeError):
        memoryview(view).cast("B")  # strided: not all bytes between are its own
    with pytest.raises(BufferError):
        view.__dlpack__(copy=True)


# ---- over memory of others


class OnlyDLPack:
    """An array that gives its memory by DLPack alone, as a tensor of PyTorch does on the host."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_a_cache_over_dlpack_memory():
    memory = np.zeros((40, 256), np.float32)
    with pagedkv.Pool(1024, buffer=OnlyDLPack(memory)) as pool:
        assert pool.device == "host" and 39 <= pool.num_blocks <= 40
        assert memory.ctypes.data <= pool.base_ptr < memory.ctypes.data + 256
        np.asarray(pool)[:] = 1
        assert memory.view(np.uint8).sum() == pool.num_blocks * 1024
    layout = pagedkv.Layout(1, 1, 8, dtype="float32", block_size=4)
    cache = pagedkv.Cache(layout, buffer=OnlyDLPack(memory), device="host")
    assert memory.ctypes.data <= cache.base_ptr < memory.ctypes.data + 256
    address = cache.base_ptr
    del memory  # the cache keeps it
    gc.collect()
    other = [np.ones((40, 256), np.float32) for _ in range(8)]
    np.asarray(cache)[:] = 5
    assert cache.base_ptr == address and all((array == 1).all() for array in other)
    cache.close()


@pytest.mark.parametrize("array, text", [
    (np.zeros((64, 64), np.float32)[:, ::2], "contiguous"),
    (np.zeros((64, 64), np.float32).T, "contiguous"),
    (np.zeros(16, np.uint8), "aligned blocks"),
    (np.zeros(0, np.uint8), "0"),
])
def test_dlpack_memory_that_is_refused(array, text):
    with pytest.raises(pagedkv.InvalidArgumentError, match=text):
        pagedkv.Pool(256, buffer=OnlyDLPack(array))


def test_read_only_dlpack_memory_is_refused():
    array = np.zeros(4096, np.uint8)
    array.flags.writeable = False
    with pytest.raises(pagedkv.InvalidArgumentError):
        pagedkv.Pool(256, buffer=OnlyDLPack(array))
    with pytest.raises(pagedkv.InvalidArgumentError, match="writable"):
        pagedkv.Pool(256, buffer=array)


def test_memory_of_another_device_is_refused():
    array = OnlyDLPack(np.zeros(4096, np.uint8))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(pagedkv.InvalidArgumentError, match="host memory, but device is 'cuda"):
            pagedkv.Pool(256, buffer=array, device=device)


def test_a_torch_tensor():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(64, 1024, dtype=torch.uint8)
    with pagedkv.Pool(1024, buffer=tensor) as pool:
        np.asarray(pool)[:] = 1
        assert int(tensor.sum()) == pool.num_blocks * 1024
    cache, _ = make("host", "bfloat16")
    shown = torch.from_dlpack(cache.k_view(0))
    assert shown.dtype == torch.bfloat16 and shown.shape == (5, 4, 3, 16)
    shown.fill_(1)
    assert (np.asarray(cache.k_view(0)) == 0x3F80).all()


def test_a_pool_over_memory_of_the_device(device):
    """Of a GPU: an array of CuPy, by DLPack or by its pointer; host memory is refused by its pointer too."""
    if device == "host":
        pytest.skip("see the tests above")
    import cupy

    memory = cupy.zeros(65536, cupy.uint8)
    for buffer in (memory, OnlyDLPack(memory), (memory.data.ptr, memory.nbytes)):
        with pagedkv.Pool(1024, buffer=buffer, device="cuda") as pool:
            assert pool.device == "cuda:0"
            pool.zero_blocks(pool.allocate(4))
    assert pagedkv.Pool(1024, buffer=OnlyDLPack(memory)).device == "cuda:0"
    host = np.zeros(65536, np.uint8)
    with pytest.raises(pagedkv.InvalidArgumentError, match="no memory of cuda:0"):
        pagedkv.Pool(1024, buffer=(host.ctypes.data, host.nbytes), device="cuda")
    with pytest.raises(pagedkv.InvalidArgumentError, match="cuda:0, but device is 'host'"):
        pagedkv.Pool(1024, buffer=OnlyDLPack(memory), device="host")
