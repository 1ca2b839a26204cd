"""Every function is called where each of its allocations fails once, or is named here with the reason why not."""

import re

import pytest
from abi_header import ROOT, read_header

FILES = ("allocation_faults.cc", "allocation_world.h")
# What allocates nothing has nothing to fail; where it does one day, its line goes.
NOT_CALLED = {
    "pkv_batch_get_info": "fills a struct of the caller",
    "pkv_cache_block_ptr": "computes an address",
    "pkv_cache_get_shard": "fills a struct of the caller",
    "pkv_cache_get_stats": "fills a struct of the caller; called through the fixture between the others",
    "pkv_cuda_query": "looks for a driver: an allocation of the loader that fails reads as one that is not there",
    "pkv_dtype_name": "gives a constant",
    "pkv_dtype_parse": "compares names",
    "pkv_host_isa": "gives a constant",
    "pkv_host_num_threads": "reads a number",
    "pkv_host_set_isa": "chooses from a table, for the whole process",
    "pkv_last_shortage": "fills a struct of the caller from this thread's",
    "pkv_namespace_get_stats": "fills a struct of the caller",
    "pkv_nvtx_enable": "loads a library: an allocation of the loader that fails is UNSUPPORTED",
    "pkv_pool_block_ptr": "computes an address",
    "pkv_pool_num_blocks": "reads a number",
    "pkv_pool_num_free": "reads a number",
    "pkv_version": "gives a constant",
}


@pytest.fixture(scope="module")
def called():
    text = "".join((ROOT / "tests" / "abi" / name).read_text() for name in FILES)
    return set(re.findall(r"\b(pkv_\w+)\(", re.sub(r"//.*", "", text)))


def test_every_other_function_is_called(called):
    assert sorted(set(read_header().functions) - called) == sorted(NOT_CALLED)


def test_every_exception_has_a_reason():
    assert all(NOT_CALLED.values())
