"""shard="sequences": whole sequences on each device. Results equal those of one device; ids, counts and refusals hold
over all of them; sequences migrate with their blocks."""
import io

import numpy as np
import pytest

import pagedkv

from .several_devices import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, SharedOut, SharedOutPair, list_device_sets

HOSTS = (["host:0", "host:1"], "host")


@pytest.fixture(params=list_device_sets(), ids=str)
def devices(request):
    return request.param


def open_all(pair, *prompts):
    pair.each(lambda side: side.sequences.extend(side.cache.open_many([list(prompt) for prompt in prompts])))


def places(side):
    return [seq.device_index for seq in side.sequences]


def test_steps_forks_and_cuts(devices):
    pair = SharedOutPair(devices)
    prompts = [range(100 * i, 100 * i + 7 + i) for i in range(4)]
    open_all(pair, *prompts)
    assert set(places(pair.sides[0])) == set(range(len(devices[0])))  # shared out
    assert pair.step([0, 1, 2, 3], [7, 8, 9, 10], [token for prompt in prompts for token in prompt])
    pair.each(lambda side: side.sequences.extend(side.cache.fork_many(side.sequences[:3])))
    assert places(pair.sides[0])[4:] == places(pair.sides[0])[:3]  # a fork stays where its parent is
    assert pair.step([6, 0, 3, 4, 5], [2, 1, 1, 3, 1], range(500, 508))
    pair.each(lambda side: side.cache.truncate_many(side.sequences[:4], [5, 6, 4, 2]))
    assert pair.step([3, 2, 1, 0], [1, 2, 3, 4], range(600, 610))
    pair.compare_stored()
    pair.check()
    pair.each(lambda side: side.cache.close_many([side.sequences.pop() for _ in range(7)]))
    assert pair.sides[0].cache.stats()["held_blocks"] == 0


def test_drafts_accepted_committed_and_reordered(devices):
    pair = SharedOutPair(devices)
    open_all(pair, *[range(100 * i, 100 * i + 6) for i in range(4)])
    assert pair.step([0, 1, 2, 3], [6] * 4, None)
    pair.each(lambda side: side.cache.commit_many(side.sequences, [range(100 * i, 100 * i + 6) for i in range(4)]))
    assert pair.step([3, 1, 0, 2], [5] * 4, [-1] * 20, register=False)
    pair.each(lambda side: side.cache.accept(side.sequences, [5, 5, 5, 5], [[1, 2], [0, 4], [], [3]]))
    pair.compare_stored()
    assert [seq.length for seq in pair.sides[0].sequences] == [8, 8, 6, 7]
    pair.each(lambda side: side.sequences.extend(side.cache.fork_many(side.sequences)))
    sources = [4, 1, 6, 3, 0, 5, 2, 7]  # of the same device each
    pair.each(lambda side: side.cache.reorder(side.sequences, sources))
    assert pair.step(range(8), [1] * 8, [-1] * 8)
    pair.compare_stored()
    pair.check()


def test_open_goes_to_the_longest_hit_then_to_free_blocks():
    side = SharedOut(HOSTS[0], num_blocks=16)
    cache = side.cache
    first = cache.open(range(20))
    first.append(range(20))
    assert first.device_index == 0
    second = cache.open(range(100, 120))  # no hit: the other device has more free blocks
    second.append(range(100, 120))
    assert second.device_index == 1
    third = cache.open([*range(100, 112), 5])  # a hit goes where it is
    assert (third.device_index, third.num_cached_tokens) == (1, 12)
    assert cache.probe([*range(100, 112), 5]) == 12
    fourth = cache.open([900])
    assert fourth.device_index == 0  # blocks are equally free, device 0 has fewer sequences
    assert [seq.device_index for seq in cache.open_many([[i, i + 1, i + 2] for i in range(4)])] == [0, 1, 0, 1]
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"^sequences\[1\]: tokens\[1\] is -5, negative"):
        cache.open_many([[1], [4, -5]])
    assert len({first.id, second.id, third.id, fourth.id}) == 4
    assert [part["num_kv_heads"] for part in cache.shards] == [NUM_KV_HEADS] * 2
    assert cache.num_blocks == 32 and [part.num_blocks for part in cache.parts] == [16, 16]
    assert cache.stats()["num_sequences"] == sum(part.stats()["num_sequences"] for part in cache.parts) == 4
    assert cache.stats()["hit_tokens"] == 12


def test_a_step_is_all_or_none():
    """A device without room refuses the step of all."""
    side = SharedOut(HOSTS[0], num_blocks=4)
    seqs = side.cache.open_many([[1], [2], [3]])
    assert [seq.device_index for seq in seqs] == [0, 1, 0]
    side.batch.prepare(seqs, [8, 4, 4], tokens=range(16))
    before = side.cache.stats()
    for counts, index, needed in (([4, 4, 1], 2, 2), ([1, 13, 0], 1, 4)):
        with pytest.raises((pagedkv.OutOfBlocksError, pagedkv.NeverFitsError)) as record:
            side.batch.prepare(seqs, counts, tokens=range(sum(counts)))
        assert record.value.index == index
    with pytest.raises(pagedkv.InvalidArgumentError):
        side.batch.prepare(seqs, [1, -1, 1])
    after = side.cache.stats()
    assert {**before, "refusals": 0} == {**after, "refusals": 0} and [seq.length for seq in seqs] == [8, 4, 4]
    side.cache.check()
    for call in (lambda: side.cache.truncate_many(seqs, [3, 9, 2]), lambda: side.cache.truncate_many(seqs, [3, 2, 5]),
                 lambda: side.cache.fork_many(seqs, [3, 9, 1]), lambda: side.cache.commit_many(seqs, [[1], [2], [3]]),
                 lambda: side.cache.accept(seqs, [1, 5, 1], [[0], [0], [0]]),
                 lambda: side.cache.reorder(seqs, [2, 3, 0])):
        with pytest.raises(pagedkv.InvalidArgumentError):
            call()
        assert [seq.length for seq in seqs] == [8, 4, 4] and side.cache.stats()["num_sequences"] == 3
    with pytest.raises(pagedkv.UnsupportedError, match="another device"):
        side.cache.reorder(seqs, [1, 0, 2])
    side.cache.check()


def test_a_failed_step_is_taken_back_everywhere():
    pair = SharedOutPair(HOSTS)
    open_all(pair, range(6), range(50, 56))
    assert pair.step([0, 1], [6, 6], [*range(6), *range(50, 56)])
    pair.each(lambda side: side.batch.prepare(side.sequences, [5, 5], tokens=range(10)))
    pair.each(lambda side: side.cache.discard(side.batch))
    assert [seq.length for seq in pair.sides[0].sequences] == [6, 6]
    assert pair.step([1, 0], [3, 2], range(5))
    pair.compare_stored()
    # One device's part of the step was changed since: nothing of the others is taken back.
    pair.each(lambda side: side.batch.prepare(side.sequences, [1, 1], tokens=[1, 2]))
    pair.each(lambda side: side.sequences[1].append([3]))
    with pytest.raises(pagedkv.InvalidArgumentError, match="changed since"):
        pair.sides[0].cache.discard(pair.sides[0].batch)
    assert [seq.length for seq in pair.sides[0].sequences] == [9, 11]


def test_tables_are_of_each_device():
    side = SharedOut(HOSTS[0])
    seqs = side.cache.open_many([[1], [2], [3]])
    side.batch.prepare(seqs, [2, 5, 1], pad_sequences=4, pad_tokens=8)
    first, second = side.batch.parts
    assert side.batch.num_sequences == 8 and side.batch.num_tokens == 16 and side.batch.max_query_len == 5
    assert first.sequence_places.tolist() == [0, 2, -1, -1] and second.sequence_places.tolist() == [1, -1, -1, -1]
    assert first.token_places.tolist() == [0, 1, 7, -1, -1, -1, -1, -1]
    assert second.token_places.tolist() == [2, 3, 4, 5, 6, -1, -1, -1]
    for name in ("seq_lens", "block_table", "slot_mapping", "indptr", "block_pointers", "token_places"):
        whole = getattr(side.batch, name)
        assert isinstance(whole, tuple)
        for table, part in zip(whole, side.batch.parts):
            np.testing.assert_array_equal(table, getattr(part, name))
    np.testing.assert_array_equal(side.batch.device_seq_lens[1], second.seq_lens)
    assert second.seq_lens.tolist() == [5, 0, 0, 0] and second.cache is side.cache.parts[1]
    assert first.block_pointers[0] == side.cache.shards[0]["base_ptr"]
    with pytest.raises(pagedkv.UnsupportedError, match="part of another"):
        first.prepare([], [])
    plain = pagedkv.Cache(side.cache.layout, num_blocks=4, device="host").batch(2, 8)
    with pytest.raises(pagedkv.UnsupportedError, match="places"):
        plain.token_places
    with pytest.raises(pagedkv.InvalidArgumentError, match="no parts"):
        plain.parts


@pytest.mark.parametrize("kind", [{}, {"dtype": "int8", "layout": {"kv_scales": "token_head"}}], ids=["float32", "int8"])
def test_migration(devices, kind):
    """There and back: blocks come with their contents, and are found there."""
    pair = SharedOutPair(devices, **kind)
    open_all(pair, range(14), range(50, 61))
    assert pair.step([0, 1], [14, 11], [*range(14), *range(50, 61)])
    side = pair.sides[0]
    seq, source, target = side.sequences[0], side.cache.parts[0], side.cache.parts[1]
    assert seq.device_index == 0
    old = seq.id
    seq.reserve(20)
    seq.migrate(1)
    assert seq.device_index == 1 and seq.id != old and seq.length == 14 and len(seq.blocks) == 4
    assert source.stats()["held_blocks"] == 0 and source.stats()["cached_blocks"] == 3
    pair.compare_stored()
    assert target.probe(range(14)) == 12  # registered there
    assert pair.step([1, 0], [2, 3], range(70, 75))
    seq.migrate(0)  # its full blocks are still cached here: two of them are taken in place of copies
    assert seq.num_cached_tokens == 12
    pair.compare_stored()
    seq.migrate(0)
    assert seq.device_index == 0
    assert pair.step([0, 1], [1, 1], [1, 2])
    pair.compare_stored()
    pair.check()
    seq.close()
    with pytest.raises(pagedkv.NotFoundError):
        seq.migrate(1)


def test_migrations_that_are_refused():
    side = SharedOut(HOSTS[0], num_blocks=4)
    first, second = side.cache.open_many([[1], [2]])
    side.batch.prepare([first, second], [9, 6], tokens=range(15))
    before = side.cache.stats()
    with pytest.raises(pagedkv.OutOfBlocksError):
        first.migrate(1)
    for wrong in (2, -1):
        with pytest.raises(pagedkv.InvalidArgumentError, match="device_index is"):
            first.migrate(wrong)
    assert {**side.cache.stats(), "refusals": 0} == {**before, "refusals": 0}
    assert (first.device_index, first.length) == (0, 9)
    side.cache.check()
    plain = pagedkv.Cache(side.cache.layout, num_blocks=4, device="host").open([1])
    with pytest.raises(pagedkv.UnsupportedError, match="not shared out"):
        plain.migrate(0)
    shifting = SharedOut(HOSTS[0], rope=pagedkv.Rope())
    seq = shifting.cache.open(range(9))
    seq.append(range(9))
    seq.shift(2, 3)
    with pytest.raises(pagedkv.UnsupportedError, match="shifted"):
        seq.migrate(1)
    assert seq.length == 6
    shifting.cache.check()


def test_what_is_asked_of_a_part():
    side = SharedOut(HOSTS[0], event_capacity=16)
    cache = side.cache
    seq = cache.open(range(9))
    seq.append(range(9))
    part = cache.parts[seq.device_index]
    assert part is cache.parts[0] and part.device == "host:0" and part.shard is None
    for call in (lambda one: one.explain(0), lambda one: one.block_ptr(0), lambda one: one.victims(1),
                 lambda one: one.read_events(), lambda one: one.pin(range(9)).unpin(), lambda one: one.evict(2),
                 lambda one: one.save(io.BytesIO()), lambda one: one.set_quota(3, 4), lambda one: one.namespace_stats(0)):
        with pytest.raises(pagedkv.UnsupportedError, match="shared out over 2 devices"):
            call(cache)
        call(part)
    assert part.victims(1) == [seq]
    assert np.asarray(memoryview(part)).shape == (64, cache.layout.block_bytes)
    # A sequence opened of a part is one of the whole.
    other = cache.parts[1].open(range(5))
    side.batch.prepare([seq, other], [1, 5])
    assert other.device_index == 1
    assert cache.touch(range(9)) == 8
    assert cache.evict() == 0 and cache.invalidate(0) == 0 and cache.zero_uncached() > 0
    file = io.BytesIO()
    seq.save(file)
    assert cache.load_sequence(io.BytesIO(file.getvalue())).length == 10
    with pytest.raises(pagedkv.BusyError):
        cache.reset()
    with pytest.raises(pagedkv.InvalidArgumentError, match="closed with the"):
        part.close()


def test_lifetimes():
    side = SharedOut(HOSTS[0])
    seq = side.cache.open(range(5))
    side.batch.prepare([seq], [5])
    part, step = side.cache.parts[0], side.batch.parts[0]
    table = step.seq_lens
    view = np.asarray(memoryview(part))
    with pytest.raises(pagedkv.BusyError):
        side.cache.close()
    del view
    side.cache.close()
    assert table.tolist() == [5]
    for call in (part.stats, lambda: step.seq_lens, lambda: part.open([1]), seq.close, lambda: side.batch.parts):
        with pytest.raises(pagedkv.PagedKVError):
            call()
    del part, step
    # Dropped in any order.
    side = SharedOut(HOSTS[0])
    part, step = side.cache.parts[1], side.batch.parts[1]
    seq = part.open([1, 2])
    side.cache = side.batch = None
    assert part.stats()["num_sequences"] == 1 and repr(step)
    del seq
    assert part.stats()["num_sequences"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(devices, seed):
    """Wherever sequences are, and wherever they go, their rows are those of one device."""
    pair = SharedOutPair(devices, seed, layout={"num_layers": 2}, num_blocks=48)
    rng = np.random.default_rng(2000 + seed)
    for _ in range(60):
        sequences = pair.sides[0].sequences
        what = rng.integers(9)
        if what <= 1 or not sequences:
            prompt = (rng.integers(2) * 1000 + np.arange(rng.integers(1, 20))).tolist()
            pair.each(lambda side, prompt=prompt: side.sequences.append(side.cache.open(prompt)))
            lengths = [side.sequences[-1].length for side in pair.sides]
            if lengths[0] != lengths[1]:  # what is cached may be on another device, or evicted on one
                pair.each(lambda side: side.sequences.pop().close())
            continue
        i = int(rng.integers(len(sequences)))
        if what == 2:
            pair.each(lambda side, i=i: side.sequences.append(side.sequences[i].fork()))
        elif what == 3:
            length = int(rng.integers(sequences[i].length + 1))
            pair.each(lambda side, i=i, length=length: side.sequences[i].truncate(length))
        elif what == 4:
            pair.each(lambda side, i=i: side.sequences.pop(i).close())
        elif what == 5:
            sequences[i].migrate(int(rng.integers(len(devices[0]))))
        else:
            chosen = rng.permutation(len(sequences))[:3].tolist()
            counts = rng.integers(0, 7, len(chosen)).tolist()
            assert pair.step(chosen, counts, rng.integers(0, 3, sum(counts)).tolist())
        if len(sequences) > 8:
            pair.each(lambda side: side.sequences.pop(0).close())
    pair.compare_stored()
    pair.check()
