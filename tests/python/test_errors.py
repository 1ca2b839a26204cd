import copy
import os
import pickle
import subprocess
import sys

import pytest

import pagedkv

HIERARCHY = {
    "InvalidArgumentError": (1, ValueError),
    "NotFoundError": (2, LookupError),
    "OutOfMemoryError": (3, MemoryError),
    "OutOfBlocksError": (4, RuntimeError),
    "NeverFitsError": (5, RuntimeError),
    "BusyError": (6, RuntimeError),
    "UnsupportedError": (7, NotImplementedError),
    "DeviceError": (8, RuntimeError),
    "InternalError": (9, RuntimeError),
}


@pytest.mark.parametrize("name", HIERARCHY)
def test_hierarchy(name):
    error = getattr(pagedkv, name)
    status, base = HIERARCHY[name]
    assert issubclass(error, pagedkv.PagedKVError)
    assert issubclass(error, RuntimeError)
    assert issubclass(error, base)
    assert error("text").status == status
    assert str(error("text")) == "text"
    assert error.__module__ == "pagedkv"
    assert error.__doc__


@pytest.mark.parametrize("name", [*HIERARCHY, "PagedKVError"])
def test_errors_pickle(name):
    error = getattr(pagedkv, name)("some text")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == "some text"
        assert other.status == error.status


@pytest.mark.parametrize("error", [pagedkv.OutOfBlocksError, pagedkv.NeverFitsError])
def test_shortage_pickles(error):
    other = pickle.loads(pickle.dumps(error("text", needed=3, available=2, index=1)))
    assert (str(other), other.needed, other.available, other.index) == ("text", 3, 2, 1)


def test_shortage_carries_numbers(cache):
    first, second = cache.open(range(40)), cache.open(range(100, 140))
    batch = cache.batch(4, 256)
    batch.prepare([first], [40], tokens=range(40))
    third = cache.open([7])
    with pytest.raises(pagedkv.OutOfBlocksError) as raised:
        batch.prepare([third, second], [1, 24], tokens=[7, *range(100, 124)])
    assert (raised.value.needed, raised.value.available, raised.value.index) == (7, 6, 1)
    assert raised.value.status == 4
    with pytest.raises(pagedkv.NeverFitsError) as raised:
        second.append([-1] * 65)
    assert (raised.value.needed, raised.value.available, raised.value.index) == (17, 16, 0)
    assert raised.value.status == 5


def test_memory_beyond_the_machine_leaves_a_working_library(layout):
    with pytest.raises(pagedkv.OutOfMemoryError) as raised:
        pagedkv.Pool(block_bytes=1 << 40, num_blocks=1 << 20, device="host")
    assert raised.value.status == 3
    with pytest.raises(pagedkv.OutOfMemoryError):
        pagedkv.Cache(layout, memory="900TiB", device="host")
    assert pagedkv.Pool(256, 4, device="host").num_free == 4


def test_version():
    assert pagedkv.__version__ == pagedkv.version()
    assert len(pagedkv.version().split(".")) == 3


@pytest.mark.parametrize("callback", [1, "print", object()])
def test_log_callback_must_be_callable(callback):
    with pytest.raises(pagedkv.InvalidArgumentError, match="callback"):
        pagedkv.set_log_callback(callback)


def test_log_callback():
    lines = []
    pagedkv.set_log_callback(lambda level, text: lines.append((level, text)))
    try:
        pagedkv.Pool(256, 4, device="host").close()
    finally:
        pagedkv.set_log_callback(None)
    assert all(level in (0, 1, 2, 3) and isinstance(text, str) for level, text in lines)


def test_log_callback_may_outlive_the_interpreter():
    code = "import pagedkv; pagedkv.set_log_callback(lambda level, text: None); pool = pagedkv.Pool(256, 4)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_paths():
    assert os.path.exists(os.path.join(pagedkv.get_include(), "pagedkv", "pagedkv.h"))
    assert os.path.basename(pagedkv.get_library()) == "libpagedkv.so"
    assert os.path.exists(os.path.join(pagedkv.get_cmake_dir(), "pagedkvConfig.cmake"))


def test_devices():
    info = pagedkv.device_info("host")
    assert info["device"] == "host"
    assert 0 < info["free_bytes"] <= info["total_bytes"]
    assert pagedkv.device_info()["device"] in ("host", "cuda:0")
    cuda = pagedkv.cuda_info()
    assert set(cuda) == {"is_built", "is_usable", "built_version", "driver_version", "num_devices", "reason"}
    assert cuda["is_usable"] == (cuda["reason"] == "")
    if not cuda["is_usable"]:
        with pytest.raises(pagedkv.UnsupportedError):
            pagedkv.device_info("cuda")


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "host:64", "a" * 1000, "host\0", "\udc80"])
def test_unknown_devices(device):
    for call in (pagedkv.device_info, lambda device: pagedkv.Pool(256, 4, device=device)):
        with pytest.raises(pagedkv.InvalidArgumentError):
            call(device)


@pytest.mark.parametrize("device", [None, 0, b"host", ["host"]])
def test_devices_are_strings(device):
    with pytest.raises(pagedkv.InvalidArgumentError, match="device must be a string"):
        pagedkv.device_info(device)


@pytest.mark.parametrize("n", [-1, 2**31, 2**63, 1.5, "2", None])
def test_bad_thread_counts(n):
    before = pagedkv.num_threads()
    with pytest.raises(pagedkv.InvalidArgumentError):
        pagedkv.set_num_threads(n)
    assert pagedkv.num_threads() == before


@pytest.mark.parametrize("name", ["", "AVX", "sse9", "x" * 600, None, 2, "auto\0"])
def test_bad_instruction_sets(name):
    before = pagedkv.isa()
    with pytest.raises((pagedkv.InvalidArgumentError, pagedkv.UnsupportedError)):
        pagedkv.set_isa(name)
    assert pagedkv.isa() == before


def test_host_settings():
    default_isa, default_threads = pagedkv.isa(), pagedkv.num_threads()
    try:
        pagedkv.set_num_threads(1)
        assert pagedkv.num_threads() == 1
        pagedkv.set_isa("reference")
        assert pagedkv.isa() == "reference"
    finally:
        pagedkv.set_num_threads(0)
        pagedkv.set_isa("auto")
    assert (pagedkv.isa(), pagedkv.num_threads()) == (default_isa, default_threads)


@pytest.mark.parametrize(
    ("variable", "value", "expression", "expected", "warns"),
    [
        ("PAGEDKV_NUM_THREADS", "1", "num_threads()", "1", False),
        ("PAGEDKV_NUM_THREADS", "many", "num_threads() > 0", "True", True),
        ("PAGEDKV_NUM_THREADS", "-3", "num_threads() > 0", "True", True),
        ("PAGEDKV_NUM_THREADS", "", "num_threads() > 0", "True", False),
        ("PAGEDKV_ISA", "reference", "isa()", "reference", False),
        ("PAGEDKV_ISA", "quantum", "isa() != 'quantum'", "True", True),
    ],
)
def test_environment(variable, value, expression, expected, warns):
    run = subprocess.run(
        [sys.executable, "-c", f"import pagedkv; print(pagedkv.{expression})"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == expected
    assert (f"{variable}={value!r} is ignored" in run.stderr) == warns
