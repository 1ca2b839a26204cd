"""Snapshots of sequences: what is loaded has the bits that were saved, in every other block size, order and device."""
import io

import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes
from .caches import ids, refused

KINDS = [(dtype, kv_scales) for dtype in dtypes.ALL for kv_scales in ("static", "token_head")
         if kv_scales == "static" or dtype in dtypes.QUANTISED]
ORDERS = ("token_head", "head_token")
BLOCK_SIZES = (1, 4, 5, 16)
SHAPE = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "v_head_dim": 16}


class Subject:
    """A cache full of random bits, and the rows of its sequences."""

    def __init__(self, device, seed=0, num_blocks=64, dtype="float32", kv_scales="static", order="token_head",
                 block_size=4, shape=SHAPE, **options):
        layout = dict(shape, dtype=dtype, kv_scales=kv_scales, order=order, block_size=block_size)
        self.arrays, self.format = arrays.for_device(device), arrays.BlockFormat(**layout)
        self.cache = pagedkv.Cache(pagedkv.Layout(**layout), num_blocks=num_blocks, device=device, **options)
        random = np.random.default_rng(seed)
        bits = random.integers(0, 256, (num_blocks, self.cache.layout.block_bytes)).astype(np.uint8)
        self.arrays.write_blocks(self.cache, bits)
        if dtype in dtypes.QUANTISED and kv_scales == "static":
            for layer in range(shape["num_layers"]):
                scales = np.arange(1, 1 + shape["num_kv_heads"], dtype=np.float32) / (layer + 2)
                self.cache.set_kv_scales(layer, scales, 2 * scales)

    def rows(self, blocks, length):
        """The bits of the first length tokens in these blocks, one array for each plane, scales behind."""
        memory = self.arrays.read_blocks(self.cache)
        planes = []
        for layer in range(self.format.num_layers):
            planes += self.format.planes(memory, layer)
        if self.format.scale_offsets:
            for layer in range(self.format.num_layers):
                planes += self.format.scales(memory, layer)
        return [np.concatenate([plane[block] for block in blocks] or [plane[:0].reshape((0,) + plane.shape[2:])])
                [:length].tobytes() for plane in planes]

    def rows_of(self, seq):
        return self.rows(np.asarray(seq.blocks).tolist(), seq.length)

    def fill(self, tokens, **options):
        seq = self.cache.open(ids(tokens), **options)
        seq.append(ids(tokens)[seq.length:])
        return seq

    def save(self, owner):
        file = io.BytesIO()
        owner.save(file)
        return file.getvalue()


def load_sequence(cache, data, **options):
    return cache.load_sequence(io.BytesIO(data), **options)


def tokens_of(seq):
    """What is stored in a sequence, from its own snapshot: -1 unknown, -2 - token for a draft."""
    file = io.BytesIO()
    seq.save(file)
    data = file.getvalue()
    layers, heads = np.frombuffer(data, "<u4", 2, 16)
    start = 128 + (8 * layers * heads if data[44] else 0) + 16 * np.frombuffer(data, "<u4", 1, 84)[0]
    return np.frombuffer(data, "<i8", seq.length, start).tolist()


@pytest.mark.parametrize("from_order", ORDERS)
@pytest.mark.parametrize("dtype, kv_scales", KINDS)
def test_every_kind_of_block(device, dtype, kv_scales, from_order):
    tokens = np.arange(100, 137)
    for from_size in BLOCK_SIZES:
        source = Subject(device, 1, dtype=dtype, kv_scales=kv_scales, order=from_order, block_size=from_size)
        seq = source.fill(tokens, namespace=7, priority=-3, tag=2**63)
        expected, data = source.rows_of(seq), source.save(seq)
        for to_order in ORDERS:
            for to_size in BLOCK_SIZES:
                target = Subject(device, 2, dtype=dtype, kv_scales=kv_scales, order=to_order, block_size=to_size)
                loaded = load_sequence(target.cache, data)
                assert target.rows_of(loaded) == expected
                assert (loaded.length, loaded.settled_length, loaded.num_cached_tokens) == (37, 37, 0)
                assert (loaded.namespace, loaded.priority, loaded.tag) == (7, -3, 2**63)
                assert tokens_of(loaded) == tokens.tolist()
                assert target.cache.open(tokens, namespace=7).length == 36 // to_size * to_size
                assert target.cache.open(tokens).length == 0
                target.cache.check()
                if (to_order, to_size) == (from_order, from_size):
                    assert target.save(loaded) == data


@pytest.mark.parametrize("order", ORDERS)
def test_between_devices(device, order):
    for block_size in (4, 5):
        there = Subject(device, 3, dtype="bfloat16", order=order, block_size=block_size)
        seq = there.fill(range(11))
        here = Subject("host", 4, dtype="bfloat16", block_size=4)
        loaded = load_sequence(here.cache, there.save(seq))
        assert here.rows_of(loaded) == there.rows_of(seq)
        back = Subject(device, 5, dtype="bfloat16", order=order, block_size=16)
        assert back.rows_of(load_sequence(back.cache, here.save(loaded))) == there.rows_of(seq)


@pytest.mark.parametrize("to_size", BLOCK_SIZES)
def test_unknown_tokens_and_drafts_stay_what_they_are(device, to_size):
    source = Subject(device, 6)
    batch = source.cache.batch(1, 64)
    seq = source.fill(range(9))
    seq.append([-1, -1])
    batch.prepare([seq], [2], tokens=[70, 71], register=False)
    seq.append([90])
    assert tokens_of(seq) == [*range(9), -1, -1, -72, -73, 90]
    target = Subject(device, 7, block_size=to_size)
    loaded = load_sequence(target.cache, source.save(seq))
    assert (loaded.length, loaded.settled_length) == (14, 9)
    assert tokens_of(loaded) == tokens_of(seq) and target.rows_of(loaded) == source.rows_of(seq)
    target.cache.check()
    assert target.cache.open(range(20)).length == 9 // to_size * to_size
    with pytest.raises(pagedkv.InvalidArgumentError, match="appended as 70"):
        loaded.commit([50, 51, 72])
    loaded.commit([50, 51, 70, 71])
    assert loaded.settled_length == 14  # the token behind was known: it settles along
    assert target.cache.open([*range(9), 50, 51, 70, 71, 90, 1]).length == 14 // to_size * to_size
    loaded.append([1, 2, 3])
    loaded.truncate(0)
    target.cache.check()


def test_a_cached_prefix_is_taken(device):
    source = Subject(device, 8, block_size=4)
    seq = source.fill(range(15))
    data = source.save(seq)
    target = Subject(device, 9, block_size=4)
    first = target.fill(list(range(8)) + [99])
    before = target.rows_of(first)
    loaded = load_sequence(target.cache, data)
    assert loaded.num_cached_tokens == 8 and list(loaded.blocks[:2]) == list(first.blocks[:2])
    assert target.rows_of(first) == before
    assert target.rows(list(loaded.blocks)[2:], 7) == source.rows(list(seq.blocks)[2:], 7)
    again = load_sequence(target.cache, data)
    assert again.num_cached_tokens == 12 and list(again.blocks[:3]) == list(loaded.blocks[:3])
    # All of a whole number of blocks is taken: there is nothing left to compute.
    whole = load_sequence(target.cache, source.save(seq.fork(12)))
    assert whole.num_cached_tokens == whole.length == 12
    assert target.cache.stats()["queried_tokens"] == 9
    target.cache.check()


def test_options_in_place_of_the_saved_ones(device):
    source = Subject(device, 10)
    data = source.save(source.fill(range(9), namespace=1, priority=2, tag=3))
    target = Subject(device, 11)
    for given in ({}, {"namespace": 8}, {"priority": -5}, {"tag": 6}, {"namespace": 0, "priority": 0, "tag": 0}):
        expected = {"namespace": 1, "priority": 2, "tag": 3, **given}
        loaded = load_sequence(target.cache, data, **given)
        assert {name: getattr(loaded, name) for name in expected} == expected
        assert target.cache.open(range(9), namespace=expected["namespace"]).length == 8
    target.cache.check()


@pytest.mark.parametrize("to_size", BLOCK_SIZES)
def test_regions(device, to_size):
    source = Subject(device, 22, block_size=4)
    salts = [(9, 70), (13, 80)]
    data = source.save(source.fill(range(40), namespace=60, salts=salts))
    target = Subject(device, 23, block_size=to_size)
    loaded = load_sequence(target.cache, data)
    assert source.save(source.cache.open(range(60), namespace=60, salts=salts))  # a hit
    assert target.cache.open(range(60), namespace=60, salts=salts).length == 40 // to_size * to_size
    assert target.cache.open(range(60), namespace=60).length == 9 // to_size * to_size
    assert target.cache.open(range(60), namespace=60, salts=salts[:1]).length == 13 // to_size * to_size
    assert target.save(loaded)[64:124] == data[64:124] and target.save(loaded)[128:176] == data[128:176]
    for given, length in (({"priority": 9}, 40), ({"tag": 9}, 40), ({"namespace": 60}, 9)):
        other = Subject(device, 24, block_size=to_size)
        load_sequence(other.cache, data, **given)
        assert other.cache.open(range(60), namespace=60, salts=salts).length == length // to_size * to_size
        other.cache.check()
    target.cache.check()


def test_quotas(device):
    source = Subject(device, 25)
    data = source.save(source.fill(range(20), namespace=5))
    target = Subject(device, 26, num_blocks=16)
    target.cache.set_quota(5, 4)
    with refused(target.cache, pagedkv.NeverFitsError):
        load_sequence(target.cache, data)
    target.cache.set_quota(5, 6)
    other = target.fill(range(50, 60), namespace=5)
    with refused(target.cache, pagedkv.OutOfBlocksError, other):
        load_sequence(target.cache, data)
    other.close()
    assert target.cache.namespace_stats(5)["cached_blocks"] == 2
    loaded = load_sequence(target.cache, data)
    assert target.cache.namespace_stats(5)["held_blocks"] == 5
    assert target.cache.namespace_stats(5)["cached_blocks"] == 1  # one gave way
    loaded.close()
    assert target.cache.namespace_stats(5)["cached_blocks"] == 6
    again = load_sequence(target.cache, data)
    assert again.num_cached_tokens == 20 and target.cache.namespace_stats(5)["evictions"] == 1
    target.cache.check()


def test_an_empty_sequence(device):
    source = Subject(device, 12)
    for block_size in (1, 16):
        target = Subject(device, 13, block_size=block_size)
        loaded = load_sequence(target.cache, source.save(source.cache.open([1, 2])))
        assert (loaded.length, loaded.num_cached_tokens, len(loaded.blocks)) == (0, 0, 0)
        assert loaded.rematch([1, 2]) == 0
        loaded.append([1, 2])


def test_reserved_blocks_and_forks(device):
    source = Subject(device, 14)
    parent = source.fill(range(6))
    child = parent.fork()
    child.reserve(40)
    child.append([7])
    target = Subject(device, 15)
    loaded = load_sequence(target.cache, source.save(child))
    assert tokens_of(loaded) == [*range(6), 7] and len(loaded.blocks) == 2
    assert load_sequence(target.cache, source.save(parent)).num_cached_tokens == 4


def test_without_prefix_caching(device):
    source = Subject(device, 16, prefix_caching=False)
    seq = source.fill(range(9))
    target = Subject(device, 17, prefix_caching=False)
    loaded = load_sequence(target.cache, source.save(seq))
    assert target.rows_of(loaded) == source.rows_of(seq) and loaded.num_cached_tokens == 0
    target.cache.check()


def test_room(device):
    source = Subject(device, 18)
    data = source.save(source.fill(range(20)))
    target = Subject(device, 19, num_blocks=4)
    with refused(target.cache, pagedkv.NeverFitsError) as record:
        load_sequence(target.cache, data)
    assert (record.value.needed, record.value.available) == (5, 4)
    target = Subject(device, 19, num_blocks=6)
    target.fill(range(8)).close()
    other = target.fill([50] * 5)
    assert target.cache.num_cached_blocks == 2
    # The cached prefix is not evicted for what stands behind it.
    with refused(target.cache, pagedkv.OutOfBlocksError, other) as record:
        load_sequence(target.cache, data)
    assert (record.value.needed, record.value.available) == (3, 2)
    other.truncate(4)
    loaded = load_sequence(target.cache, data)
    assert loaded.num_cached_tokens == 8 and target.cache.stats()["evictions"] == 0
    target.cache.check()


def test_layouts_that_do_not_agree(device):
    data = {}
    for dtype in ("float16", "int8"):
        source = Subject(device, 20, dtype=dtype)
        data[dtype] = source.save(source.fill(range(9)))
    for name, value in (("num_layers", 1), ("num_kv_heads", 2), ("head_dim", 16), ("v_head_dim", 8)):
        target = Subject(device, 21, dtype="float16", shape=dict(SHAPE, **{name: value}))
        with refused(target.cache, pagedkv.UnsupportedError) as record:
            load_sequence(target.cache, data["float16"])
        assert f"{name} {SHAPE[name]}, but the cache {value}" in str(record.value)
    with refused(Subject(device, 21, dtype="bfloat16").cache, pagedkv.UnsupportedError) as record:
        load_sequence(Subject(device, 21, dtype="bfloat16").cache, data["float16"])
    assert "dtype" in str(record.value)
    target = Subject(device, 21, dtype="int8", kv_scales="token_head")
    with refused(target.cache, pagedkv.UnsupportedError) as record:
        load_sequence(target.cache, data["int8"])
    assert "kv_scales" in str(record.value)
    target = Subject(device, 21, dtype="int8")
    target.cache.set_kv_scales(1, np.float32([1, 2, 3]) / 3, np.float32([2, 4, 7]) / 3)
    with refused(target.cache, pagedkv.UnsupportedError) as record:
        load_sequence(target.cache, data["int8"])
    assert "v_scale 2 for layer 1, head 2" in str(record.value)
