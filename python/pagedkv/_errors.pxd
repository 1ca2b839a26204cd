from pagedkv.abi cimport PKV_OK, pkv_status

# Raises the exception of a failed call with the calling thread's last error as its text.
cdef int raise_last(pkv_status status) except -1

# Turns the status of a C call into an exception. To be called by the thread that made the call.
cdef inline int check(pkv_status status) except -1:
    if status == PKV_OK:
        return 0
    return raise_last(status)
