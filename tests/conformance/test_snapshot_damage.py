"""Snapshots that are cut, damaged or made up: refused, with nothing changed and no memory wasted."""
import io
import resource
import struct

import pytest

import pagedkv

from .caches import take_picture
from .test_snapshot import Subject

TINY = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 8}
PARTS = (pagedkv.InvalidArgumentError, pagedkv.UnsupportedError)  # the latter where the version or layout is damaged


def make_tiny(device, kv_scales="static"):
    """A tiny cache with something in it, and the snapshots of a sequence and of the tree from another one."""
    source = Subject(device, 1, 8, dtype="int8", kv_scales=kv_scales, block_size=2, shape=TINY)
    seq = source.fill(range(5), namespace=3)
    data = source.save(seq), source.save(source.cache)
    target = Subject(device, 2, 8, dtype="int8", kv_scales=kv_scales, block_size=2, shape=TINY)
    held = target.fill([1, 2, 3])
    target.fill([7, 8, 9]).close()
    return target, held, data


def check_refusals(target, held, load, damaged, errors):
    before = take_picture(target.cache, [held]), target.arrays.read_blocks(target.cache).tobytes()
    for data in damaged:
        with pytest.raises(errors) as record:
            load(io.BytesIO(data))
        assert type(record.value) in (errors if isinstance(errors, tuple) else (errors,))
        assert "\n" not in str(record.value)
    assert (take_picture(target.cache, [held]), target.arrays.read_blocks(target.cache).tobytes()) == before
    target.cache.check()


@pytest.mark.parametrize("kv_scales", ("static", "token_head"))
def test_cut_at_every_byte(device, kv_scales):
    target, held, data = make_tiny(device, kv_scales)
    for load, whole in zip((target.cache.load_sequence, target.cache.load), data):
        cut = [whole[:size] for size in range(len(whole))]
        check_refusals(target, held, load, cut, pagedkv.InvalidArgumentError)
        load(io.BytesIO(whole))


@pytest.mark.parametrize("kv_scales", ("static", "token_head"))
def test_every_byte_changed(device, kv_scales):
    target, held, data = make_tiny(device, kv_scales)
    for load, whole in zip((target.cache.load_sequence, target.cache.load), data):
        damaged = [whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1:]
                   for place in range(len(whole)) for change in (1, 0x80, 0xFF)]
        check_refusals(target, held, load, damaged, PARTS)
        load(io.BytesIO(whole))


def test_blocks_in_another_order(device):
    """The checksum of a block knows its place."""
    target, held, (data, _) = make_tiny(device)
    size = 2 * 16 + 4  # of a full block and its checksum
    blocks = len(data) - (2 * size + 16 + 4)
    first, second = data[blocks:blocks + size], data[blocks + size:blocks + 2 * size]
    swapped = data[:blocks] + second + first + data[blocks + 2 * size:]
    check_refusals(target, held, target.cache.load_sequence, [swapped], pagedkv.InvalidArgumentError)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<I", crc ^ 0xFFFFFFFF)


def forge(data, index=None, **fields):
    """A snapshot with other fields in its header, and the checksum that goes with them."""
    places = {"version": ("<I", 8), "kind": ("<I", 12), "block_size": ("<i", 40), "has_scales": ("<I", 44),
              "num_blocks": ("<Q", 48), "index_bytes": ("<Q", 56), "num_regions": ("<I", 84), "length": ("<q", 88),
              "settled_length": ("<q", 96)}
    header = bytearray(data[:124])
    for name, value in fields.items():
        form, place = places[name]
        struct.pack_into(form, header, place, value)
    rest = data[128:]
    if index is not None:
        (size,) = struct.unpack_from("<Q", data, 56)
        rest = index + crc32c(index) + data[128 + size + 4:]
        struct.pack_into("<Q", header, 56, len(index))
    return bytes(header) + crc32c(header) + rest


def test_made_up_headers(device):
    target, held, (sequence, tree) = make_tiny(device)
    assert forge(sequence) == sequence and forge(tree) == tree
    damaged = [forge(sequence, **fields) for fields in (
        {"kind": 0}, {"kind": 3}, {"kind": 2**31}, {"block_size": 0}, {"block_size": -1}, {"block_size": 65537},
        {"block_size": 3}, {"has_scales": 0}, {"has_scales": 2}, {"num_blocks": 2}, {"num_blocks": 4},
        {"num_blocks": 2**64 - 1}, {"index_bytes": 0}, {"index_bytes": 2**64 - 1}, {"length": -1}, {"length": 4},
        {"length": 2**31 - 1}, {"length": 2**63 - 1}, {"settled_length": 6}, {"settled_length": -1},
        {"num_regions": 1}, {"num_regions": 2**32 - 1})]
    check_refusals(target, held, target.cache.load_sequence, damaged, pagedkv.InvalidArgumentError)
    check_refusals(target, held, target.cache.load_sequence,
                   [forge(sequence, version=2), forge(sequence, version=0)], pagedkv.UnsupportedError)
    damaged = [forge(tree, **fields) for fields in (
        {"num_blocks": 0}, {"num_blocks": 3}, {"num_blocks": 2**31}, {"num_blocks": 2**64 - 1}, {"block_size": 1},
        {"block_size": 65536}, {"num_regions": 7})]
    check_refusals(target, held, target.cache.load, damaged, pagedkv.InvalidArgumentError)


def test_made_up_indices(device):
    target, held, (sequence, tree) = make_tiny(device)
    scales, tokens = sequence[128:136], sequence[136:176]
    bad_tokens = struct.pack("<5q", 0, 1, -1, 3, 4)
    damaged = [forge(sequence, scales + bad_tokens)]
    for regions in ([0], [-1], [3, 3], [4, 2]):
        index = scales + b"".join(struct.pack("<qQ", start, 9) for start in regions) + tokens
        damaged.append(forge(forge(sequence, index), num_regions=len(regions)))
    check_refusals(target, held, target.cache.load_sequence, damaged, pagedkv.InvalidArgumentError)
    nodes = [(-1, 3, 0, 1), (0, 3, 2, 3)]
    good = scales + b"".join(struct.pack("<qQqq", *node) for node in nodes)
    assert forge(tree, good) == tree
    damaged = []
    for nodes in ([(0, 3, 0, 1), (0, 3, 2, 3)], [(-1, 3, 0, 1), (1, 3, 2, 3)], [(-1, 3, 0, 1), (-2, 3, 2, 3)],
                  [(2**62, 3, 0, 1), (0, 3, 2, 3)], [(-1, 3, 0, -1), (0, 3, 2, 3)]):
        damaged.append(forge(tree, scales + b"".join(struct.pack("<qQqq", *node) for node in nodes)))
    check_refusals(target, held, target.cache.load, damaged, pagedkv.InvalidArgumentError)


def test_sizes_that_a_file_claims_cost_nothing(device):
    target, held, (sequence, tree) = make_tiny(device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    length = 2**31 - 1
    damaged = [forge(sequence, length=length, num_blocks=(length + 1) // 2, index_bytes=8 + 8 * length),
               forge(sequence, length=length, block_size=65536, num_blocks=2**15, index_bytes=8 + 8 * length)]
    check_refusals(target, held, target.cache.load_sequence, damaged, pagedkv.InvalidArgumentError)
    count = 2**31 - 1
    damaged = [forge(tree, num_blocks=count, index_bytes=8 + count * 32),
               forge(tree, num_blocks=count, block_size=65536, index_bytes=8 + count * (16 + 8 * 65536))]
    check_refusals(target, held, target.cache.load, damaged, pagedkv.InvalidArgumentError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
