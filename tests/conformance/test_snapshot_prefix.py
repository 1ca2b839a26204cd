"""Snapshots of the prefix cache: the tree of all that can be hit."""
import io

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, ids, refused
from .test_snapshot import BLOCK_SIZES, KINDS, ORDERS, Subject

ROW_BYTES = 2 * 3 * (8 + 16) * 4  # of a token: float32, Subject's shape


def load(cache, data):
    added = cache.load(io.BytesIO(data))
    cache.check()
    return added


def rows_of_hit(subject, tokens, **options):
    """Rows of the cached prefix of tokens."""
    seq = subject.cache.open(ids(tokens), **options)
    rows = subject.rows_of(seq)
    seq.close()
    return rows


def fill_alike(subject, tokens):
    """Caches tokens with bits that depend on the tokens up to each: equal paths hold equal bits, as in a real model."""
    seq = subject.fill(tokens)
    memory = subject.arrays.read_blocks(subject.cache)
    for position in range(len(tokens)):
        block, offset = np.asarray(seq.blocks)[position // subject.format.block_size], position % subject.format.block_size
        random = np.random.default_rng(tokens[:position + 1])
        for layer in range(subject.format.num_layers):
            planes = subject.format.planes(memory, layer)
            for plane in planes + (subject.format.scales(memory, layer) if subject.format.scale_offsets else ()):
                row = plane[block, offset]
                row[:] = np.frombuffer(random.bytes(row.nbytes), row.dtype).reshape(row.shape)
    subject.arrays.write_blocks(subject.cache, memory)
    seq.close()


PROMPTS = [list(range(37)), list(range(20)) + list(range(200, 217)), list(range(18)) + [5] * 20, [9] * 40,
           list(range(20)) + list(range(200, 210)) + [3] * 7]


@pytest.mark.parametrize("from_order", ORDERS)
@pytest.mark.parametrize("dtype, kv_scales", KINDS)
def test_every_kind_of_block(device, dtype, kv_scales, from_order):
    for from_size in BLOCK_SIZES:
        source = Subject(device, 1, 128, dtype=dtype, kv_scales=kv_scales, order=from_order, block_size=from_size)
        for prompt in PROMPTS:
            fill_alike(source, prompt)
        data = source.save(source.cache)
        for to_order, to_size in zip(ORDERS + ORDERS, BLOCK_SIZES):
            target = Subject(device, 2, 512, dtype=dtype, kv_scales=kv_scales, order=to_order, block_size=to_size)
            added = load(target.cache, data)
            assert added == target.cache.num_cached_blocks == target.cache.stats()["registered"]
            for prompt in PROMPTS:
                prompt = prompt + [77] * 17
                stored = count_hit(source.cache, prompt)
                hit = count_hit(target.cache, prompt)
                assert hit == stored // to_size * to_size
                expected = source.cache.open(ids(prompt))
                loaded = target.cache.open(ids(prompt))
                blocks = np.asarray(expected.blocks).tolist(), np.asarray(loaded.blocks).tolist()
                assert target.rows(blocks[1], hit) == source.rows(blocks[0], hit)


def test_shared_prefixes_are_saved_once(device):
    source = Subject(device, 3, 256)
    size = len(source.save(source.cache))
    source.fill(range(41))
    assert len(source.save(source.cache)) == size + 10 * (16 + 4 * 8 + 4 * ROW_BYTES + 4)
    kept = [source.fill([*range(40), *range(100 * i, 100 * i + 5)]) for i in range(1, 9)]
    data = source.save(source.cache)
    assert len(data) == size + 18 * (16 + 4 * 8 + 4 * ROW_BYTES + 4)
    target = Subject(device, 4, 18)
    assert load(target.cache, data) == 18
    assert load(target.cache, data) == 0
    assert [count_hit(target.cache, [*range(40), *range(100 * i, 100 * i + 6)]) for i in range(1, 9)] == [44] * 8
    assert all(seq.length == 45 for seq in kept)


def test_namespaces(device):
    source = Subject(device, 5)
    for namespace in (0, 1, 2**64 - 1):
        source.fill(range(9 + 4 * (namespace == 1)), namespace=namespace).close()
    data = source.save(source.cache)
    for to_size in (2, 4, 8):
        target = Subject(device, 6, block_size=to_size)
        load(target.cache, data)
        hits = [count_hit(target.cache, range(20), namespace=namespace) for namespace in (0, 1, 2, 2**64 - 1)]
        assert hits == [8, 12 // to_size * to_size, 0, 8]


def test_regions(device):
    source = Subject(device, 19)
    salts = [(8, 70), (16, 80)]
    source.fill(range(25), namespace=60, salts=salts).close()
    source.fill([*range(8), *range(90, 99)], namespace=60, salts=[(8, 71)]).close()
    data = source.save(source.cache)
    for to_size in (1, 2, 4, 8):  # regions begin with a block, so nothing is lost
        target = Subject(device, 20, block_size=to_size)
        load(target.cache, data)
        assert target.cache.probe(range(30), namespace=60, salts=salts) == 24
        assert target.cache.probe([*range(8), *range(90, 99)], namespace=60, salts=[(8, 71)]) == 16
        assert target.cache.probe(range(30), namespace=60) == 8
        assert target.cache.probe(range(30), namespace=60, salts=salts[:1]) == 16
        assert target.cache.namespace_stats(80)["cached_blocks"] == 8 // to_size
    target = Subject(device, 20, block_size=3)
    load(target.cache, data)
    assert target.cache.probe(range(30), namespace=60, salts=[(8, 70), (16, 80)]) == 24


def test_an_invalidated_namespace(device):
    source = Subject(device, 21)
    salts = [(8, 70)]
    source.fill(range(17), namespace=60, salts=salts).close()
    held = source.fill([*range(8), *range(50, 59)], namespace=60, salts=salts)
    assert source.cache.invalidate(60) >= 2
    target = Subject(device, 22)
    assert load(target.cache, source.save(source.cache)) == 0
    source.fill(range(17), namespace=60, salts=salts)
    assert load(target.cache, source.save(source.cache)) == 4
    held.append([1, 2, 3, 4])
    assert load(target.cache, source.save(source.cache)) == 0
    source.cache.check()


def test_quotas(device):
    source = Subject(device, 23)
    source.fill(range(21), namespace=5).close()
    data = source.save(source.cache)
    target = Subject(device, 24, 16)
    target.cache.set_quota(5, 4)
    with refused(target.cache, pagedkv.OutOfBlocksError):
        target.cache.load(io.BytesIO(data))
    target.cache.set_quota(5, 6)
    other = target.fill(range(50, 59), namespace=5)
    with refused(target.cache, pagedkv.OutOfBlocksError, other):
        target.cache.load(io.BytesIO(data))
    other.close()
    target.fill(range(9), namespace=5).close()
    assert target.cache.namespace_stats(5)["cached_blocks"] == 4
    assert load(target.cache, data) == 3
    assert target.cache.probe(range(30), namespace=5) == 20
    assert target.cache.namespace_stats(5)["cached_blocks"] == 6
    assert load(target.cache, data) == 0


def test_empty_caches(device):
    data = Subject(device, 7).save(Subject(device, 7).cache)
    target = Subject(device, 8)
    assert load(target.cache, data) == 0
    # Of blocks that are larger than everything saved, none comes about.
    source = Subject(device, 7, block_size=4)
    source.fill(range(9))
    assert load(Subject(device, 8, block_size=16).cache, source.save(source.cache)) == 0
    without = Subject(device, 9, prefix_caching=False)
    without.fill(range(9))
    assert without.save(without.cache) == data
    with refused(without.cache, pagedkv.UnsupportedError):
        without.cache.load(io.BytesIO(data))


def test_held_blocks_are_saved_and_duplicates_are_not(device):
    source = Subject(device, 10, 8)
    batch = source.cache.batch(2, 16)
    pair = [source.cache.open(range(5)), source.cache.open(range(5))]
    batch.prepare(pair, [5, 5], tokens=[*range(5), *range(5)])
    assert pair[0].blocks[0] != pair[1].blocks[0]
    data = source.save(source.cache)
    target = Subject(device, 11)
    assert load(target.cache, data) == 1
    registered = pair[0] if source.cache.explain(pair[0].blocks[0])["is_registered"] else pair[1]
    assert rows_of_hit(target, range(5)) == source.rows(list(registered.blocks), 4)


def test_what_is_cached_already_stays(device):
    source = Subject(device, 12)
    source.fill(range(17)).close()
    data = source.save(source.cache)
    target = Subject(device, 13, 5)
    kept = target.fill(range(9))
    kept.truncate(8)
    before = target.rows_of(kept)
    kept.close()
    target.fill([50] * 9).close()  # unrelated: evicted for what is loaded
    assert target.cache.num_cached_blocks == 4
    assert load(target.cache, data) == 2
    assert rows_of_hit(target, range(9)) == before
    assert count_hit(target.cache, range(17)) == 16
    assert count_hit(target.cache, [50] * 9) == 4  # one of its two blocks was enough


def test_room(device):
    source = Subject(device, 14)
    source.fill(range(21)).close()
    data = source.save(source.cache)
    target = Subject(device, 15, 4)
    with refused(target.cache, pagedkv.NeverFitsError) as record:
        target.cache.load(io.BytesIO(data))
    assert (record.value.needed, record.value.available) == (5, 4)
    target = Subject(device, 15, 6)
    target.fill(range(9)).close()
    held = target.fill([50] * 5)
    with refused(target.cache, pagedkv.OutOfBlocksError, held) as record:
        target.cache.load(io.BytesIO(data))
    assert (record.value.needed, record.value.available) == (3, 2)
    held.close()
    assert load(target.cache, data) == 3
    assert count_hit(target.cache, range(21)) == 20


def test_parents_outlive_children(device):
    source = Subject(device, 16)
    source.fill(range(21)).close()
    source.fill([*range(12), *range(90, 99)]).close()
    target = Subject(device, 17, 7)
    assert load(target.cache, source.save(source.cache)) == 7
    hits = []
    for num_left in range(6, -1, -1):
        target.cache.evict(7 - num_left)
        hits.append(count_hit(target.cache, range(21)) + count_hit(target.cache, [*range(12), *range(90, 99)]))
        cached = {tuple(target.cache.explain(block)["tokens"]) for block in range(7)
                  if target.cache.explain(block)["state"] == "cached"}
        assert len(cached) == num_left
        target.cache.check()
    assert hits == sorted(hits, reverse=True)
    assert hits[-2:] == [8, 0]


def test_wrong_kind(device):
    source = Subject(device, 18)
    seq = source.fill(range(9))
    data = source.save(seq), source.save(source.cache)
    with refused(source.cache, pagedkv.InvalidArgumentError, seq) as record:
        source.cache.load(io.BytesIO(data[0]))
    assert "one of a sequence (1), not one of a prefix tree" in str(record.value)
    with refused(source.cache, pagedkv.InvalidArgumentError, seq) as record:
        source.cache.load_sequence(io.BytesIO(data[1]))
    assert "one of a prefix tree (2), not one of a sequence" in str(record.value)


def test_namespaces_that_end_inside_a_block(device):
    source = Subject(device, 25)
    cases = [(0, [(3, 70)]), (60, [(3, 70)]), (60, [(4, 70), (9, 80), (11, 90)]), (61, [(1, 62), (2, 63)])]
    keep = [source.fill(range(17), namespace=namespace, salts=salts) for namespace, salts in cases]
    assert [seq.num_cached_tokens for seq in keep] == [0, 0, 0, 0]
    data = source.save(source.cache)
    for to_size in BLOCK_SIZES[1:]:
        target = Subject(device, 26, block_size=to_size)
        load(target.cache, data)
        for namespace, salts in cases if to_size == 4 else cases[:2]:
            assert target.cache.probe(range(18), namespace=namespace, salts=salts) == 16 // to_size * to_size
        for namespace, salts in ((1, [(3, 70)]), (70, []), (70, [(3, 70)]), (61, [(1, 63)]), (63, []), (0, [])):
            assert target.cache.probe(range(18), namespace=namespace, salts=salts) == 0
    assert load(source.cache, data) == 0
    assert source.save(source.cache) == data
