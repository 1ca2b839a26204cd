"""The C library alone, by ctypes: a pool for a runtime that has its own block tables and kernels.

    python ctypes_only.py [libpagedkv.so]

Without a path it takes the library of the installed Python package. Any language that can call C can do the same.
"""

import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p


class PoolOptions(ctypes.Structure):  # pkv_pool_options
    _fields_ = [
        ("struct_size", c_size_t),
        ("block_bytes", c_uint64),
        ("num_blocks", c_int64),
        ("device", c_char_p),
        ("memory", c_void_p),
        ("memory_bytes", c_uint64),
    ]


class Shortage(ctypes.Structure):  # pkv_shortage
    _fields_ = [("struct_size", c_size_t), ("needed", c_int64), ("available", c_int64), ("index", c_int64)]


def load(path):
    library = ctypes.CDLL(path)
    library.pkv_version.restype = c_char_p
    library.pkv_last_error.restype = c_char_p
    library.pkv_status_name.restype = c_char_p
    library.pkv_pool_create.argtypes = [POINTER(PoolOptions), POINTER(c_void_p)]
    library.pkv_pool_destroy.argtypes = [c_void_p]
    library.pkv_pool_destroy.restype = None
    library.pkv_pool_allocate.argtypes = [c_void_p, c_int64, POINTER(c_int32)]
    library.pkv_pool_free.argtypes = [c_void_p, POINTER(c_int32), c_int64]
    library.pkv_pool_block_ptr.argtypes = [c_void_p, c_int32, POINTER(c_void_p)]
    library.pkv_pool_copy_blocks.argtypes = [c_void_p, POINTER(c_int32), POINTER(c_int32), c_int64, c_void_p]
    library.pkv_last_shortage.argtypes = [POINTER(Shortage)]
    return library


def main():
    if len(sys.argv) > 1:
        path = sys.argv[1]
    else:
        import pagedkv

        path = pagedkv.get_library()
    library = load(path)
    print("libpagedkv", library.pkv_version().decode())

    def check(status):
        if status != 0:
            raise RuntimeError(f"{library.pkv_status_name(status).decode()}: {library.pkv_last_error().decode()}")

    # Four blocks of 4 KiB. struct_size lets the library grow its structs; zero is the default of the rest.
    options = PoolOptions(ctypes.sizeof(PoolOptions), 4096, 4, b"host")
    pool = c_void_p()
    check(library.pkv_pool_create(byref(options), byref(pool)))

    blocks = (c_int32 * 3)()
    check(library.pkv_pool_allocate(pool, 3, blocks))
    print("allocated blocks", list(blocks))

    # Blocks are plain memory; copies between them go through the library, on any device.
    address = c_void_p()
    check(library.pkv_pool_block_ptr(pool, blocks[0], byref(address)))
    ctypes.memmove(address, b"keys and values", 15)
    check(library.pkv_pool_copy_blocks(pool, blocks, (c_int32 * 1)(blocks[2]), 1, None))
    check(library.pkv_pool_block_ptr(pool, blocks[2], byref(address)))
    print("copied:", ctypes.string_at(address, 15).decode())

    # All or nothing: a refused call says what was missing.
    status = library.pkv_pool_allocate(pool, 3, (c_int32 * 3)())
    shortage = Shortage(ctypes.sizeof(Shortage))
    check(library.pkv_last_shortage(byref(shortage)))
    name = library.pkv_status_name(status).decode()
    print(f"refused: {name}, {shortage.needed} needed, {shortage.available} available")

    check(library.pkv_pool_free(pool, blocks, 3))
    try:
        check(library.pkv_pool_free(pool, blocks, 3))
    except RuntimeError as error:
        print("refused:", error)
    library.pkv_pool_destroy(pool)


if __name__ == "__main__":
    main()
