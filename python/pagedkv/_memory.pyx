# cython: language_level=3
"""How much memory a cache is to have."""
import math
import re

from libc.stdint cimport uint64_t

from pagedkv._arrays cimport as_double, as_uint64
from pagedkv._errors import InvalidArgumentError

cdef dict UNITS = {"": 1, "k": 1000, "m": 1000 ** 2, "g": 1000 ** 3, "t": 1000 ** 4, "ki": 1 << 10, "mi": 1 << 20,
                   "gi": 1 << 30, "ti": 1 << 40}
cdef object MEMORY_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


cdef uint64_t parse_bytes(str text, str name) except? 0:
    match = MEMORY_TEXT.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"{name} must be like \"20GiB\", \"512MB\" or \"1e9\", got {text!r}")
    number = float(match[1]) if not match[1].isdecimal() else int(match[1])
    size = number * UNITS[(match[2] or "").lower()]
    if size == math.inf:
        raise InvalidArgumentError(f"{name} is out of range: {text!r}")
    return as_uint64(int(size), name)


cdef uint64_t as_bytes(object size, str name) except? 0:
    cdef uint64_t num_bytes = parse_bytes(size, name) if isinstance(size, str) else as_uint64(size, name)
    if num_bytes == 0:
        raise InvalidArgumentError(f"{name} must be at least one byte, got {size!r}")
    return num_bytes


cdef int set_memory(pkv_cache_options *options, object memory) except -1:
    # "20GiB", bytes as an int, or a share of the free memory as a float.
    cdef double share
    if isinstance(memory, str):
        options.pool_bytes = parse_bytes(memory, "memory")
    elif hasattr(memory, "__index__"):
        options.pool_bytes = as_uint64(memory, "memory")
    else:
        share = as_double(memory, "memory")
        if not 0 < share <= 1:
            raise InvalidArgumentError(f"memory as a float is a share of the free memory in (0, 1], got {memory!r}; "
                                       "bytes are given as an int or a string")
        options.memory_fraction = share
        return 0
    if options.pool_bytes == 0:
        raise InvalidArgumentError(f"memory must be at least one byte, got {memory!r}")
    return 0
