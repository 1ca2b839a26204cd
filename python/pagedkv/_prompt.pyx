# cython: language_level=3, boundscheck=False, wraparound=False
"""Prompts as the C library takes them."""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memset

from pagedkv._arrays cimport as_int64, as_uint64, describe, release_ints, view_ints
from pagedkv._errors import InvalidArgumentError


cdef int read_prompt(object tokens, object namespace, object salts, Prompt *out) except -1:
    memset(&out.options, 0, sizeof(out.options))
    out.options.struct_size = sizeof(out.options)
    out.options.namespace_id = as_uint64(namespace, "namespace")
    out.regions = NULL
    if salts is not None:
        read_salts(salts, out)
    try:
        view_ints(tokens, "tokens", sizeof(int64_t), &out.view)
    except BaseException:
        PyMem_Free(out.regions)
        raise
    out.tokens = <const int64_t *> out.view.data
    out.num_tokens = out.view.count
    return 0


cdef int read_salts(object salts, Prompt *out) except -1:
    # Pairs of (first token, namespace).
    cdef Py_ssize_t i
    try:
        pairs = [(start, region) for start, region in salts]
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"salts must be pairs (start, namespace), got {describe(salts)}") from None
    pairs = [(as_int64(start, "start of a salt"), as_uint64(region, "namespace of a salt")) for start, region in pairs]
    if not pairs:
        return 0
    out.regions = <pkv_namespace_region *> PyMem_Malloc(<size_t> len(pairs) * sizeof(pkv_namespace_region))
    if out.regions == NULL:
        raise MemoryError()
    for i in range(len(pairs)):
        out.regions[i].start, out.regions[i].namespace_id = pairs[i]
    out.options.regions = out.regions
    out.options.num_regions = len(pairs)
    return 0


cdef void release_prompt(Prompt *prompt) noexcept:
    release_ints(&prompt.view)
    PyMem_Free(prompt.regions)
