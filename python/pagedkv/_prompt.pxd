from libc.stdint cimport int64_t

from pagedkv._arrays cimport IntView
from pagedkv.abi cimport pkv_namespace_region, pkv_open_options

# A prompt as the C library takes it: tokens, and the namespaces that they belong to. After read_prompt has succeeded
# release_prompt must follow.
cdef struct Prompt:
    IntView view
    const int64_t *tokens
    int64_t num_tokens
    pkv_open_options options
    pkv_namespace_region *regions

cdef int read_prompt(object tokens, object namespace, object salts, Prompt *out) except -1
cdef void release_prompt(Prompt *prompt) noexcept
