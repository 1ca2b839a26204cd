from pagedkv._cache cimport Cache
from pagedkv._sequence cimport Sequence
from pagedkv.abi cimport pkv_sequence, pkv_stream

# file: a path, or a binary file object, whose exceptions come out as themselves.
cdef int save_sequence(Cache cache, pkv_sequence id, object file, pkv_stream stream) except -1
cdef Sequence load_sequence(Cache cache, object file, object namespace, object priority, object tag, pkv_stream stream)
cdef int save_prefixes(Cache cache, object file, pkv_stream stream) except -1
cdef object load_prefixes(Cache cache, object file, pkv_stream stream)
