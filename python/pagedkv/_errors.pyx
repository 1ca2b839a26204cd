# cython: language_level=3, binding=True
"""Exceptions, one for each status of the C library; its version and its log."""
import atexit

from cpython.exc cimport PyErr_WriteUnraisable

from pagedkv.abi cimport (
    PKV_BUSY, PKV_DEVICE_ERROR, PKV_INTERNAL, PKV_INVALID_ARGUMENT, PKV_NEVER_FITS, PKV_NOT_FOUND, PKV_OK,
    PKV_OUT_OF_BLOCKS, PKV_OUT_OF_MEMORY, PKV_UNSUPPORTED, pkv_last_error, pkv_last_shortage, pkv_log_level,
    pkv_set_log_callback, pkv_shortage, pkv_status, pkv_status_name, pkv_version)


class PagedKVError(RuntimeError):
    """A call of pagedkv failed. `status` is the pkv_status of the C library."""

    __module__ = "pagedkv"
    status = <int> PKV_INTERNAL


class InvalidArgumentError(PagedKVError, ValueError):
    """The call is wrong, whatever the state: a value, a shape, a type, a closed object."""

    __module__ = "pagedkv"
    status = <int> PKV_INVALID_ARGUMENT


class NotFoundError(PagedKVError, LookupError):
    """A sequence that was closed or never existed."""

    __module__ = "pagedkv"
    status = <int> PKV_NOT_FOUND


class OutOfMemoryError(PagedKVError, MemoryError):
    """Host or device memory could not be had."""

    __module__ = "pagedkv"
    status = <int> PKV_OUT_OF_MEMORY


class _ShortageError(PagedKVError):
    """Blocks are wanting: `needed` by the call, `available` to it; `index` of the first sequence that does not fit."""

    def __init__(self, message="", needed=0, available=0, index=0):
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.index = index


class OutOfBlocksError(_ShortageError):
    """Not now: close or preempt sequences, then retry. Carries `needed`, `available` and `index`."""

    __module__ = "pagedkv"
    status = <int> PKV_OUT_OF_BLOCKS


class NeverFitsError(_ShortageError):
    """Larger than the whole pool: retrying is in vain. Carries `needed`, `available` and `index`."""

    __module__ = "pagedkv"
    status = <int> PKV_NEVER_FITS


class BusyError(PagedKVError):
    """Refused while something is still in use."""

    __module__ = "pagedkv"
    status = <int> PKV_BUSY


class UnsupportedError(PagedKVError, NotImplementedError):
    """Valid, but not available here; the text names the value."""

    __module__ = "pagedkv"
    status = <int> PKV_UNSUPPORTED


class DeviceError(PagedKVError):
    """The device or its driver failed."""

    __module__ = "pagedkv"
    status = <int> PKV_DEVICE_ERROR


class InternalError(PagedKVError):
    """A broken invariant: a bug of the library."""

    __module__ = "pagedkv"
    status = <int> PKV_INTERNAL


_BY_STATUS = {
    error.status: error
    for error in (InvalidArgumentError, NotFoundError, OutOfMemoryError, OutOfBlocksError, NeverFitsError, BusyError,
                  UnsupportedError, DeviceError, InternalError)
}


cdef int raise_last(pkv_status status) except -1:
    cdef str text = pkv_last_error().decode("utf-8", "replace")
    cdef pkv_shortage shortage
    if not text:
        text = pkv_status_name(status).decode()
    if status == PKV_OUT_OF_BLOCKS or status == PKV_NEVER_FITS:
        shortage.struct_size = sizeof(pkv_shortage)
        if pkv_last_shortage(&shortage) == PKV_OK:
            raise _BY_STATUS[<int> status](text, shortage.needed, shortage.available, shortage.index)
    raise _BY_STATUS.get(<int> status, PagedKVError)(text)


def version():
    """Version of the loaded C library, "major.minor.patch"."""
    return pkv_version().decode()


cdef object _log_callback = None


cdef void _forward_log(pkv_log_level level, const char *message, void *user_data) noexcept with gil:
    callback = _log_callback
    if callback is None:
        return
    try:
        callback(<int> level, message.decode("utf-8", "replace"))
    except BaseException:
        PyErr_WriteUnraisable(callback)  # the C library must never see an exception


def set_log_callback(callback):
    """Has the library's log lines sent to callback(level, message), or to nobody with None.

    level is 0 debug, 1 info, 2 warning, 3 error. The callback runs in any thread and must not call pagedkv; what it
    raises is reported as unraisable."""
    global _log_callback
    if callback is not None and not callable(callback):
        raise InvalidArgumentError(f"callback must be callable or None, got {type(callback).__name__}")
    if callback is None:
        check(pkv_set_log_callback(NULL, NULL))
        _log_callback = None
    else:
        _log_callback = callback
        check(pkv_set_log_callback(_forward_log, NULL))


# A thread of the library must not enter an interpreter that is going down.
atexit.register(set_log_callback, None)
