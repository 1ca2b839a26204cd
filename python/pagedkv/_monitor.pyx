# cython: language_level=3, binding=True
"""Monitoring: measures, the page of statistics, recordings, ranges for a profiler."""
from cpython.exc cimport PyErr_WriteUnraisable
from libc.string cimport memset

import atexit
import itertools
import os
import tempfile

from pagedkv._arrays cimport describe
from pagedkv._cache cimport Cache
from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport (
    pkv_cache_fragmentation, pkv_cache_measure, pkv_cache_publish_stats, pkv_cache_unpublish_stats, pkv_nvtx_enable,
    pkv_set_range_callbacks, pkv_trace_start, pkv_trace_stop)

cdef extern from *:
    """
    static inline void pkv_order_loads(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    """
    void pkv_order_loads()

cdef object page_numbers = itertools.count()


def order_loads():
    """What is read of shared memory after this call is no older than what was read before it. Some processors, not
    x86, need to be told."""
    pkv_order_loads()


def get_stats_folder():
    """Where publish_stats() puts its pages and `pagedkv top` looks for them: PAGEDKV_STATS_DIR, else /dev/shm, else
    XDG_RUNTIME_DIR, else the folder for temporary files."""
    for folder in (os.environ.get("PAGEDKV_STATS_DIR"), "/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):
        if folder and (os.path.isdir(folder) or folder == os.environ.get("PAGEDKV_STATS_DIR")):
            return folder
    return tempfile.gettempdir()


cdef bytes as_path(object path):
    cdef bytes name
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(f"path must be a path, got {describe(path)}")
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidArgumentError(f"path has a NUL in it: {path!r}")
    return name


def trace_start(Cache self, path):
    """Records every call that changes the cache into a file, for `pagedkv replay`. The cache must be empty: no
    open sequences, pins or cached blocks (BusyError)."""
    cdef bytes name = as_path(path)
    self.enter()
    check(pkv_trace_start(self._cache, name))


def trace_stop(Cache self):
    """Ends the recording. DeviceError if it could not be written whole."""
    self.enter()
    check(pkv_trace_stop(self._cache))


def measure(Cache self):
    """Measures fragmentation and asks the device for its memory; stats() has both from then on.

    A dict: unused_slots (token slots of the held_blocks that hold no token, those of reserved_blocks included), their
    share as unused_share, free_tail_blocks (behind the last held one), num_free_runs, longest_free_run."""
    cdef pkv_cache_fragmentation measured
    memset(&measured, 0, sizeof(measured))
    measured.struct_size = sizeof(measured)
    self.enter()
    check(pkv_cache_measure(self._cache, &measured))
    num_slots = measured.held_blocks * self.layout.block_size
    return {
        "held_blocks": measured.held_blocks,
        "unused_slots": measured.unused_slots,
        "unused_share": measured.unused_slots / num_slots if num_slots else 0.0,
        "reserved_blocks": measured.reserved_blocks,
        "free_tail_blocks": measured.free_tail_blocks,
        "num_free_runs": measured.num_free_runs,
        "longest_free_run": measured.longest_free_run,
    }


def publish_stats(Cache self, path=None):
    """Shows the statistics to other processes, such as `pagedkv top`, in a page of shared memory; returns its path.

    path: a file that is made, by default pkv-PID-N in the folder that PAGEDKV_STATS_DIR names, or /dev/shm. Writing it
    costs some stores for each call that changes the cache. unpublish_stats() and close() remove it."""
    if path is None:
        path = os.path.join(get_stats_folder(), f"pkv-{os.getpid()}-{next(page_numbers)}")
    name = as_path(path)
    self.enter()
    check(pkv_cache_publish_stats(self._cache, name))
    return os.path.abspath(os.fsdecode(name))


def unpublish_stats(Cache self):
    """Removes the page that publish_stats() made; does nothing without one."""
    self.enter()
    check(pkv_cache_unpublish_stats(self._cache))


cdef object range_push = None
cdef object range_pop = None


cdef void forward_push(const char *name, void *user_data) noexcept with gil:
    callback = range_push
    try:
        if callback is not None:
            callback(name.decode("utf-8", "replace"))
    except BaseException:
        PyErr_WriteUnraisable(callback)  # the C library must never see an exception


cdef void forward_pop(void *user_data) noexcept with gil:
    callback = range_pop
    try:
        if callback is not None:
            callback()
    except BaseException:
        PyErr_WriteUnraisable(callback)


def set_range_callbacks(push, pop):
    """Has push(name) called at the beginning of prepare, copies, snapshots and kernels, and pop() at the end, in the thread
    of the call, nested; None, None for nobody. They must not call pagedkv; what they raise is reported as unraisable."""
    global range_push, range_pop
    for name, callback in (("push", push), ("pop", pop)):
        if callback is not None and not callable(callback):
            raise InvalidArgumentError(f"{name} must be callable or None, got {describe(callback)}")
    if (push is None) != (pop is None):
        raise InvalidArgumentError("push and pop must be given both or neither")
    if push is None:
        check(pkv_set_range_callbacks(NULL, NULL, NULL))
        range_push = range_pop = None
    else:
        range_push, range_pop = push, pop
        check(pkv_set_range_callbacks(forward_push, forward_pop, NULL))


def enable_nvtx(path):
    """Has those ranges sent to a profiler as NVTX ranges. path: its injection library, or one with nvtxRangePushA.

    Where the profiler names its library in the environment variable NVTX_INJECTION64_PATH, importing pagedkv does this.
    UnsupportedError if the library cannot be loaded or takes no ranges."""
    name = as_path(path)
    check(pkv_nvtx_enable(name))


# A thread of the library must not enter an interpreter that is going down.
atexit.register(set_range_callbacks, None, None)
