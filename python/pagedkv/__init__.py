"""pagedkv: a paged KV cache for LLM inference.

A Pool hands out blocks of memory, a Cache maps token sequences to blocks, a Batch is one step's view of a cache, and
write_kv and attend work through it. All of it is a thin layer over the C library, whose header says the same things in
C: get_include(), get_library() and get_cmake_dir() say where that is."""

from __future__ import annotations

import os as _os
import warnings as _warnings

from pagedkv._errors import (
    BusyError,
    DeviceError,
    InternalError,
    InvalidArgumentError,
    NeverFitsError,
    NotFoundError,
    OutOfBlocksError,
    OutOfMemoryError,
    PagedKVError,
    UnsupportedError,
    set_log_callback,
    version,
)
from pagedkv._pool import Pool, cuda_info, device_info
from pagedkv._layout import Layout
from pagedkv._cache import Cache
from pagedkv._sequence import Sequence
from pagedkv._transfer import Transfer
from pagedkv._snapshot import block_hash
from pagedkv._pin import Pin
from pagedkv._resize import PreparedResize
from pagedkv._batch import Batch
from pagedkv._views import MemoryView
from pagedkv._monitor import enable_nvtx, get_stats_folder, set_range_callbacks
from pagedkv._attention import Rope, isa, merge_states, num_threads, set_isa, set_num_threads

__version__ = version()

__all__ = [
    "Batch",
    "BusyError",
    "Cache",
    "DeviceError",
    "InternalError",
    "InvalidArgumentError",
    "Layout",
    "MemoryView",
    "NeverFitsError",
    "NotFoundError",
    "OutOfBlocksError",
    "OutOfMemoryError",
    "PagedKVError",
    "Pin",
    "Pool",
    "PreparedResize",
    "Rope",
    "Sequence",
    "Transfer",
    "UnsupportedError",
    "block_hash",
    "cuda_info",
    "device_info",
    "enable_nvtx",
    "get_cmake_dir",
    "get_include",
    "get_library",
    "get_stats_folder",
    "isa",
    "merge_states",
    "num_threads",
    "set_isa",
    "set_log_callback",
    "set_num_threads",
    "set_range_callbacks",
    "version",
]


def _find(path: str) -> str:
    # An editable install has two roots: the sources and the installed files.
    for root in __path__:
        found = _os.path.join(root, path)
        if _os.path.exists(found):
            return found
    raise FileNotFoundError(f"{path} is not in the installed package, looked in {', '.join(__path__)}")


def get_include() -> str:
    """Folder to give to a C or C++ compiler with -I."""
    return _find("include")


def get_library() -> str:
    """The shared library."""
    return _find(_os.path.join("lib", "libpagedkv.so"))


def get_cmake_dir() -> str:
    """Folder of pagedkvConfig.cmake, for -Dpagedkv_DIR."""
    return _find(_os.path.join("lib", "cmake", "pagedkv"))


def _apply_environment() -> None:
    # A bad value must not make the package unusable.
    threads = _os.environ.get("PAGEDKV_NUM_THREADS")
    if threads:
        try:
            set_num_threads(int(threads))
        except ValueError as error:
            _warnings.warn(f"PAGEDKV_NUM_THREADS={threads!r} is ignored: {error}", RuntimeWarning, stacklevel=3)
    name = _os.environ.get("PAGEDKV_ISA")
    if name:
        try:
            set_isa(name)
        except PagedKVError as error:
            _warnings.warn(f"PAGEDKV_ISA={name!r} is ignored: {error}", RuntimeWarning, stacklevel=3)
    profiler = _os.environ.get("NVTX_INJECTION64_PATH")
    if profiler:
        try:
            enable_nvtx(profiler)
        except PagedKVError as error:
            _warnings.warn(f"NVTX_INJECTION64_PATH={profiler!r} is ignored: {error}", RuntimeWarning, stacklevel=3)


_apply_environment()
