"""Arrays of every kind reach the kernels without a copy and with the right dtype, shape and strides."""

import array
import ctypes

import numpy as np
import pytest

import pagedkv


def to_bits(values):
    """bfloat16 bits by cutting off: exact for the small integers of these tests."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def values():
    """Small integers: every float dtype holds them exactly."""
    return np.random.default_rng(5).integers(-8, 8, (3, 2, 16)).astype(np.float32)


class Store:
    """A cache of one block and one step of 3 tokens: what write_kv stores can be read back."""

    def __init__(self, dtype):
        layout = pagedkv.Layout(1, 2, 16, dtype=dtype, block_size=4)
        self.cache = pagedkv.Cache(layout, num_blocks=1, device="host")
        np.asarray(self.cache)[:] = 0
        self.sequence = self.cache.open([0, 1, 2])
        self.batch = self.cache.batch(1, 4)
        self.batch.prepare([self.sequence], [3])

    def write(self, k, v=None):
        self.cache.write_kv(0, self.batch, k, k if v is None else v)

    def read(self, dtype):
        memory = np.asarray(self.cache)[0].view(dtype)[: 4 * 2 * 16]
        return memory.reshape(4, 2, 16)[:3].copy()


# ---- DLPack, made by hand, so that every dtype, device and version can be had without a framework


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

DL_CODES = {"f": 2, "u": 1, "i": 0, "bfloat": 4, "bool": 6, "e4m3fn": 10, "e5m2": 12, "e4m3": 8}


class DLPack:
    """What a framework's tensor looks like from outside. strides in elements; None: left out, contiguous."""

    def __init__(self, data, code=None, shape=None, strides="given", device=(1, 0), version=None, read_only=False,
                 offset=0, lanes=1):  # fmt: skip
        self.data = data
        self.device = device
        self.version = version
        shape = data.shape if shape is None else shape
        strides = [s // data.itemsize for s in data.strides] if strides == "given" else strides
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None
        tensor = Tensor(
            data.ctypes.data - offset, *device, len(shape), DL_CODES[code or data.dtype.kind], 8 * data.itemsize, lanes,
            self.shape, self.strides, offset,
        )  # fmt: skip
        if version is None:
            self.managed, self.name = Managed(tensor, None, None), b"dltensor"
        else:
            self.managed, self.name = Versioned(*version, None, None, int(read_only), tensor), b"dltensor_versioned"
        self.streams = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if self.version is None and options:
            raise TypeError("max_version is not known here")
        self.streams.append(stream)
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


class OnlyDLPack:
    """numpy's own capsule, without numpy's other interfaces."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


# ---- What is stored


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy(values, dtype):
    store = Store(np.dtype(dtype).name)
    store.write(values.astype(dtype))
    np.testing.assert_array_equal(store.read(dtype), values)


def test_bfloat16_bits(values):
    store = Store("bfloat16")
    store.write(to_bits(values))
    np.testing.assert_array_equal(store.read(np.uint16), to_bits(values))
    q = to_bits(values)
    out = store.cache.attend(0, store.batch, q)
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(from_bits(out)[0], values[0])


def test_extension_types(values):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    store = Store("bfloat16")
    store.write(values.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(store.read(np.uint16), to_bits(values))
    out = store.cache.attend(0, store.batch, values.astype(ml_dtypes.bfloat16))
    assert out.dtype == ml_dtypes.bfloat16
    given = np.zeros(values.shape, ml_dtypes.bfloat16)
    assert store.cache.attend(0, store.batch, values.astype(ml_dtypes.bfloat16), out=given) is given
    np.testing.assert_array_equal(given.view(np.uint16), out.view(np.uint16))
    for name, kind in (("float8_e4m3", ml_dtypes.float8_e4m3fn), ("float8_e5m2", ml_dtypes.float8_e5m2)):
        store = Store(name)
        quantised = values.astype(kind)
        store.write(quantised)
        np.testing.assert_array_equal(store.read(kind).astype(np.float32), quantised.astype(np.float32))
        bits = Store(name)
        bits.write(quantised.view(np.uint8))
        np.testing.assert_array_equal(bits.read(np.uint8), quantised.view(np.uint8))
    for kind in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4):
        with pytest.raises(pagedkv.InvalidArgumentError, match="k "):
            Store("float8_e4m3").write(np.zeros((3, 2, 16), kind))


def test_int8(values):
    store = Store("int8")
    store.write(values.astype(np.int8))
    np.testing.assert_array_equal(store.read(np.int8), values)


def test_uint8_stands_for_the_float8_of_the_cache_only():
    bits = np.zeros((3, 2, 16), np.uint8)
    for dtype in ("float32", "bfloat16", "int8"):
        with pytest.raises(pagedkv.InvalidArgumentError, match="uint8"):
            Store(dtype).write(bits)


def test_strides(values):
    store = Store("float32")
    wide = np.full((3, 4, 32), np.nan, np.float32)
    wide[:, ::2, :16] = values
    store.write(wide[:, ::2, :16])
    np.testing.assert_array_equal(store.read(np.float32), values)
    store.write(values[::-1].copy()[::-1])
    np.testing.assert_array_equal(store.read(np.float32), values)
    row = np.arange(16, dtype=np.float32)
    store.write(np.broadcast_to(row, (3, 2, 16)))
    np.testing.assert_array_equal(store.read(np.float32)[2, 1], row)
    out = np.zeros((3, 4, 16), np.float32)[:, ::2]
    assert store.cache.attend(0, store.batch, values, out=out) is out
    np.testing.assert_array_equal(out, store.cache.attend(0, store.batch, values))


def test_dimensions_of_one_have_any_stride(values):
    store = Store("float32")
    store.batch.prepare([store.sequence], [1])
    one = np.lib.stride_tricks.as_strided(values[:1], (1, 2, 16), (7, 64, 4))
    store.write(one)
    np.testing.assert_array_equal(np.asarray(store.cache)[0].view(np.float32)[96:128], values[0].ravel())


def test_unaligned(values):
    raw = bytearray(values.nbytes + 1)
    with pytest.raises(pagedkv.InvalidArgumentError, match="aligned"):
        Store("float32").write(np.frombuffer(raw, np.float32, offset=1, count=values.size).reshape(3, 2, 16))


def test_buffers(values):
    store = Store("float32")
    store.write(memoryview(values))
    np.testing.assert_array_equal(store.read(np.float32), values)
    scales = array.array("f", [0.0] * 2)
    store.cache.attend(0, store.batch, values, sinks=scales)
    lse = memoryview(np.zeros((3, 2), np.float32))
    store.cache.attend(0, store.batch, values, lse=lse)
    assert np.asarray(lse).any()


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1)])
def test_dlpack(values, version):
    store = Store("float32")
    tensor = DLPack(values, version=version)
    store.write(tensor)
    np.testing.assert_array_equal(store.read(np.float32), values)
    assert tensor.streams == [None, None]
    store.write(DLPack(values, version=version, strides=None))
    np.testing.assert_array_equal(store.read(np.float32), values)
    shifted = np.concatenate([np.zeros(4, np.float32), values.ravel()])
    store.write(DLPack(shifted[4:], shape=(3, 2, 16), strides=None, offset=16, version=version))
    np.testing.assert_array_equal(store.read(np.float32), values)
    out = np.zeros_like(values)
    given = DLPack(out, version=version)
    assert store.cache.attend(0, store.batch, DLPack(values, version=version), out=given) is given
    np.testing.assert_array_equal(out, store.cache.attend(0, store.batch, values))


@pytest.mark.parametrize(
    ("dtype", "code", "kind"),
    [("bfloat16", "bfloat", np.uint16), ("bfloat16", "u", np.uint16), ("float8_e4m3", "e4m3fn", np.uint8),
     ("float8_e5m2", "e5m2", np.uint8), ("float8_e4m3", "u", np.uint8), ("int8", "i", np.int8),
     ("float16", "f", np.float16)],
)  # fmt: skip
def test_dlpack_dtypes(dtype, code, kind):
    bits = np.random.default_rng(1).integers(0, 100, (3, 2, 16)).astype(kind)
    store = Store(dtype)
    store.write(DLPack(bits, code=code, version=(1, 0)))
    np.testing.assert_array_equal(store.read(kind), bits)
    if code == "bfloat":
        assert store.cache.attend(0, store.batch, DLPack(bits, code=code)).dtype == np.uint16


def test_numpy_by_dlpack(values):
    store = Store("float32")
    store.write(OnlyDLPack(values))
    np.testing.assert_array_equal(store.read(np.float32), values)


class Raising:
    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise BufferError("it requires a gradient")


class NoCapsule(Raising):
    def __dlpack__(self, **options):
        return 3


class UsedCapsule(Raising):
    def __dlpack__(self, **options):
        return new_capsule(id(self), b"used_dltensor", None)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda v: DLPack(v, device=(2, 0)), "CUDA memory"),
        (lambda v: DLPack(v, device=(10, 0)), "type 10"),
        (lambda v: DLPack(v, lanes=2), "lanes"),
        (lambda v: DLPack(v.astype(np.float64)), "f64"),
        (lambda v: DLPack(v.astype(np.int32)), "i32"),
        (lambda v: DLPack(v.astype(np.uint8), code="e4m3"), "code 8"),
        (lambda v: DLPack(v.astype(np.uint8), code="bool"), "bool"),
        (lambda v: DLPack(v, shape=(3, 2, 8), strides=(32, 16, 2)), "last dimension"),
        (lambda v: DLPack(v, shape=(1, 1, 1, 1, 1), strides=None), "5 dimensions"),
        (lambda v: DLPack(v, shape=(), strides=None), "0 dimensions"),
        (lambda v: DLPack(v, shape=(-3, 2, 16), strides=None), "negative"),
        (lambda v: DLPack(v, version=(2, 0)), "2.0"),
        (lambda v: Raising(), "gradient"),
        (lambda v: NoCapsule(), "capsule"),
        (lambda v: UsedCapsule(), "used"),
    ],
)
def test_bad_dlpack(values, make, text):
    store = Store("float32")
    with pytest.raises((pagedkv.InvalidArgumentError, pagedkv.UnsupportedError)) as raised:
        store.write(make(values))
    assert text in str(raised.value)
    assert not store.read(np.float32).any()


def test_dlpack_on_cuda_asks_for_no_synchronisation(values):
    tensor = DLPack(values, device=(2, 1))
    with pytest.raises(pagedkv.InvalidArgumentError, match="CUDA memory"):
        Store("float32").write(tensor)
    assert tensor.streams == [-1, -1]


def test_read_only_dlpack(values):
    store = Store("float32")
    store.write(DLPack(values, version=(1, 0), read_only=True))
    with pytest.raises(pagedkv.InvalidArgumentError, match="read-only"):
        store.cache.attend(0, store.batch, values, out=DLPack(np.zeros_like(values), version=(1, 0), read_only=True))


def test_torch(values):
    torch = pytest.importorskip("torch")
    store = Store("bfloat16")
    store.write(torch.from_numpy(values).bfloat16())
    np.testing.assert_array_equal(store.read(np.uint16), to_bits(values))
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    assert store.cache.attend(0, store.batch, torch.from_numpy(values).bfloat16(), out=out) is out
    np.testing.assert_array_equal(out[0].float().numpy(), values[0])
    assert pagedkv.Layout(1, 2, 16, dtype=torch.bfloat16).dtype == "bfloat16"
    sequence = store.cache.open(torch.arange(3))
    sequence.close()


def test_raw_pointers(values):
    store = Store("float32")
    store.write((values.ctypes.data, (3, 2, 16), "float32"))
    np.testing.assert_array_equal(store.read(np.float32), values)
    twice = values.repeat(2, axis=1)
    store.write((twice.ctypes.data, [3, 2, 16], np.float32, [64, 32, 1]))
    np.testing.assert_array_equal(store.read(np.float32), values)
    out = np.zeros_like(values)
    given = (out.ctypes.data, out.shape, out.dtype)
    assert store.cache.attend(0, store.batch, values, out=given) is given
    np.testing.assert_array_equal(out[0], values[0])
    half = Store("bfloat16")
    bits = to_bits(values)
    for dtype in ("bfloat16", "uint16", np.uint16):
        half.write((bits.ctypes.data, bits.shape, dtype))
        np.testing.assert_array_equal(half.read(np.uint16), bits)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: (0, (3, 2, 16), "float32"), "address 0"),
        (lambda p: (p + 1, (3, 2, 16), "float32"), "aligned"),
        (lambda p: (-1, (3, 2, 16), "float32"), "pointer"),
        (lambda p: ("p", (3, 2, 16), "float32"), "pointer"),
        (lambda p: (2**64, (3, 2, 16), "float32"), "pointer"),
        (lambda p: (p, 96, "float32"), "shape"),
        (lambda p: (p, (), "float32"), "shape"),
        (lambda p: (p, (1, 1, 1, 1, 1), "float32"), "shape"),
        (lambda p: (p, (3, 2, 16.0), "float32"), "shape"),
        (lambda p: (p, (3, 2, -16), "float32"), "negative"),
        (lambda p: (p, (3, 2, 2**63), "float32"), "64 bits"),
        (lambda p: (p, (3, 2, 2**62), "float32"), "too large"),
        (lambda p: (p, (2**40, 2**40, 16), "float32"), "too large"),
        (lambda p: (p, (3, 2, 16), "float32", (-(2**63), 16, 1)), "too large"),
        (lambda p: (p, (3, 2, 16), "float64"), "float64"),
        (lambda p: (p, (3, 2, 16), "int32"), "int32"),
        (lambda p: (p, (3, 2, 16), None), "dtype"),
        (lambda p: (p, (3, 2, 16), "uint8"), "uint8"),
        (lambda p: (p, (3, 2, 16), "float32", (32, 16)), "strides"),
        (lambda p: (p, (3, 2, 16), "float32", 1), "strides"),
        (lambda p: (p, (3, 2, 16), "float32", (32, 16, 2)), "last dimension"),
        (lambda p: (p,), "tuple"),
        (lambda p: (p, (3, 2, 16)), "tuple"),
        (lambda p: (), "tuple"),
    ],
)
def test_bad_raw_pointers(values, make, text):
    store = Store("float32")
    with pytest.raises(pagedkv.InvalidArgumentError) as raised:
        store.write(make(values.ctypes.data))
    assert text in str(raised.value)


class CudaArray:
    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"shape": (3, 2, 16), "typestr": "<f4", "data": (4096, False), "version": 3,
                                         **interface}  # fmt: skip


@pytest.mark.parametrize(
    ("interface", "text"),
    [(dict(), "CUDA memory"), (dict(strides=(128, 64, 4)), "CUDA memory"), (dict(typestr="<f8"), "<f8"),
     (dict(typestr=">f4"), "big-endian"), (dict(strides=(128, 64, 8)), "last dimension"),
     (dict(strides=(127, 64, 4)), "127"), (dict(data=(0, False)), "address 0"), (dict(shape=3), "shape")],
)  # fmt: skip
def test_cuda_arrays_are_not_for_the_host(interface, text):
    store = Store("float32")
    with pytest.raises(pagedkv.InvalidArgumentError) as raised:
        store.write(CudaArray(**interface))
    assert text in str(raised.value)


def test_cuda_memory_cannot_be_a_host_pool():
    with pytest.raises(pagedkv.InvalidArgumentError, match="CUDA memory"):
        pagedkv.Pool(256, device="host", buffer=CudaArray())
    with pytest.raises(pagedkv.InvalidArgumentError, match="writable"):
        pagedkv.Pool(256, buffer=CudaArray(data=(4096, True)))
    with pytest.raises(pagedkv.InvalidArgumentError, match="contiguous"):
        pagedkv.Pool(256, buffer=CudaArray(strides=(256, 64, 4)))
    if not pagedkv.cuda_info()["is_usable"]:
        with pytest.raises(pagedkv.UnsupportedError):
            pagedkv.Pool(256, buffer=CudaArray())
