"""Tiers behind several devices, beside those of a single device; and where sequences are shared out, a share for each.
(test_host_tier.py, test_disk_tier.py and test_preempt.py run over several devices as a whole.)"""
import numpy as np
import pytest

import pagedkv

from .caches import ids, open_with
from .several_devices import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, Pair, SharedOutPair, list_device_sets

LAYOUT = pagedkv.Layout(2, 2, 8, dtype="float32", block_size=4)
SLOT_BYTES = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4 * BLOCK_SIZE  # of several_devices.Side, no padding in it


@pytest.fixture(params=list_device_sets(), ids=str)
def devices(request):
    return request.param


def walk(pair, seed, num_calls=60):
    """Opens that hit in the tier, steps, preemption, evictions: on both sides alike."""
    print(f"seed {seed}")
    rng = np.random.default_rng([5, seed])
    offloaded = []  # of each side
    for _ in range(num_calls):
        sequences = pair.sides[0].sequences
        what = rng.integers(8)
        if what <= 2 or not sequences:
            tokens = (rng.integers(4) * 1000 + np.arange(rng.integers(1, 22))).tolist()
            pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
            hit = sequences[-1].length
            assert pair.sides[1].sequences[-1].length == hit
            if not pair.step([len(sequences) - 1], [len(tokens) - hit], tokens[hit:]):
                pair.each(lambda side: side.sequences.pop().close())
        elif what == 3:
            i = int(rng.integers(len(sequences)))
            pair.each(lambda side: side.sequences.pop(i).close())
        elif what == 4:
            i = int(rng.integers(len(sequences)))
            if pair.same(lambda side: side.sequences[i].offload()) is None:
                offloaded.append([side.sequences.pop(i) for side in pair.sides])
        elif what == 5 and offloaded:
            both = offloaded[int(rng.integers(len(offloaded)))]
            if pair.same(lambda side: both[pair.sides.index(side)].restore()) is None:
                offloaded.remove(both)
                for side, seq in zip(pair.sides, both):
                    side.sequences.append(seq)
        elif what == 6:
            count = pair.sides[1].cache.num_free_blocks
            pair.each(lambda side: [part.evict(min(count, part.num_free_blocks)) for part in parts_of(side.cache)])
        else:
            i = int(rng.integers(len(sequences)))
            pair.step([i], [2], rng.integers(0, 3, 2).tolist())
        if len(sequences) > 5:
            pair.each(lambda side: side.sequences.pop(0).close())
    pair.check()
    pair.compare_stored()


def parts_of(cache):
    return cache.parts if cache.shard == "sequences" else [cache]


@pytest.mark.parametrize("shard", ["heads", "layers"])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(devices, shard, seed):
    pair = Pair(devices, shard, seed, num_blocks=14, host_tier=20 * SLOT_BYTES)
    walk(pair, seed)
    stats = [side.cache.stats() for side in pair.sides]
    assert stats[0]["host_hit_tokens"] > 0 and stats[0]["host_tier_blocks"] == 20
    if pair.is_exact:
        assert stats[0]["offload_rate"] > 0 and stats[0]["restore_rate"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_resizes_beside_a_tier(devices, seed):
    pair = Pair(devices, "heads", seed, num_blocks=20, max_num_blocks=24, host_tier=30 * SLOT_BYTES)
    rng = np.random.default_rng(seed)
    for i in range(6):
        walk(pair, 10 * seed + i, num_calls=12)
        pair.same(lambda side, n=int(rng.integers(12, 25)): side.cache.resize(n, move=True))
    pair.check()


# ---- Sequences shared out


def make_shared(**options):
    options = {"num_blocks": 6, "host_tier": 9 * LAYOUT.block_bytes, "devices": ["host:0", "host:1"]} | options
    return pagedkv.Cache(LAYOUT, shard="sequences", **options)


def fill(cache, prompt, byte):
    """A sequence with these tokens, every byte of its full blocks this one."""
    seq = open_with(cache, prompt)
    memory = np.asarray(memoryview(cache.parts[seq.device_index]))
    memory[seq.blocks[: len(prompt) // 4]] = byte
    return seq


def read(cache, seq):
    memory = np.asarray(memoryview(cache.parts[seq.device_index]))
    return np.unique(memory[seq.blocks[: seq.length // 4]]).tolist()


def evict_all(cache):
    for part in cache.parts:
        part.evict(part.num_free_blocks)
        np.asarray(memoryview(part))[:] = 0


def test_slots_are_shared_out():
    cache = make_shared()
    assert [part.stats()["host_tier_blocks"] for part in cache.parts] == [5, 4]
    assert cache.stats()["host_tier_blocks"] == 9
    with pytest.raises(pagedkv.InvalidArgumentError, match="room for 1 blocks, fewer than the 2 devices"):
        make_shared(host_tier=LAYOUT.block_bytes)


def test_hits_and_preemption_by_device():
    cache = make_shared()
    prompts = [list(range(9)), list(range(100, 109))]
    first, second = (fill(cache, prompt, byte) for byte, prompt in enumerate(prompts, 1))
    assert (first.device_index, second.device_index) == (0, 1)
    second.offload()
    first.close()
    assert cache.stats()["offloaded_sequences"] == 1 and second.is_offloaded
    evict_all(cache)
    assert [part.stats()["host_tier_resident"] for part in cache.parts] == [2, 3]
    with pytest.raises(pagedkv.BusyError):
        second.migrate(0)
    for byte, prompt in enumerate(prompts, 1):
        assert cache.probe(prompt) == 8
        seq = cache.open(prompt)
        assert (seq.device_index, seq.length) == (byte - 1, 8) and read(cache, seq) == [byte]
        seq.close()
    second.restore()
    assert read(cache, second) == [2] and second.length == 9
    stats = cache.stats()
    assert stats["host_hit_tokens"] == 16 and stats["offloaded_blocks"] == 5 and stats["restored_blocks"] == 5
    assert stats["offload_rate"] == sum(part.stats()["offload_rate"] for part in cache.parts) > 0
    second.migrate(0)
    cache.check()


def test_files_of_each_device(tmp_path):
    path = tmp_path / "blocks"
    options = {"disk_tier": path, "disk_tier_bytes": 1 << 20}
    prompts = [list(range(9)), list(range(100, 109))]
    with make_shared(**options) as cache:
        assert cache.stats()["is_disk_tier_on"] is True
        sequences = [fill(cache, prompt, byte) for byte, prompt in enumerate(prompts, 1)]
        for seq in sequences:
            seq.close()
        evict_all(cache)
        cache.flush_tiers()
        assert cache.stats()["disk_writes"] == 4
        assert [part.stats()["disk_tier_resident"] for part in cache.parts] == [2, 2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blocks.0", "blocks.1"]
    with make_shared(**options) as cache:
        for byte, prompt in enumerate(prompts, 1):
            seq = cache.open(prompt)
            assert (seq.device_index, seq.length) == (byte - 1, 8) and read(cache, seq) == [byte]
    for byte, prompt in enumerate(prompts, 1):  # a file is that of a cache on one device
        with pagedkv.Cache(LAYOUT, num_blocks=6, device="host", host_tier=4 * LAYOUT.block_bytes,
                           disk_tier=tmp_path / f"blocks.{byte - 1}", disk_tier_bytes=1 << 20) as cache:
            assert cache.probe(ids(prompts[byte - 1])) == 8 and cache.probe(ids(prompts[2 - byte])) == 0
    with pytest.raises(pagedkv.InvalidArgumentError, match="in each of 2 files"):
        make_shared(disk_tier=path, disk_tier_bytes=4096 + 8192)


def test_one_file_that_cannot_be_used(tmp_path):
    (tmp_path / "blocks.1").write_bytes(b"something else" * 400)
    messages = []
    pagedkv.set_log_callback(lambda level, text: messages.append(text))
    try:
        cache = make_shared(disk_tier=tmp_path / "blocks", disk_tier_bytes=1 << 20)
    finally:
        pagedkv.set_log_callback(None)
    assert any("blocks.1" in text for text in messages)
    assert [part.stats()["is_disk_tier_on"] for part in cache.parts] == [True, False]
    assert cache.stats()["is_disk_tier_on"] is False


@pytest.mark.parametrize("seed", range(2))
def test_random_calls_on_parts(devices, seed):
    """Room enough that nothing is refused: what is hit differs by device, what stands there does not."""
    pair = SharedOutPair(devices, seed, num_blocks=40, host_tier=90 * SLOT_BYTES, layout={"num_layers": 2})
    print(f"seed {seed}")
    rng = np.random.default_rng([6, seed])
    for _ in range(25):
        sequences = pair.sides[0].sequences
        tokens = (rng.integers(4) * 1000 + np.arange(rng.integers(1, 22))).tolist()
        pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
        lengths = [side.sequences[-1].length for side in pair.sides]
        for side, length in zip(pair.sides, lengths):  # hits differ: both go on from the shorter one
            side.sequences[-1].truncate(min(lengths))
        hit = min(lengths)
        assert pair.step([len(sequences) - 1], [len(tokens) - hit], tokens[hit:])
        if rng.random() < 0.5:
            i = int(rng.integers(len(sequences)))
            pair.each(lambda side: side.sequences[i].offload())
            pair.each(lambda side: [part.evict(part.num_free_blocks) for part in parts_of(side.cache)])
            pair.each(lambda side: side.sequences[i].restore())
        if len(sequences) > 4:
            pair.each(lambda side: side.sequences.pop(0).close())
        pair.check()
    pair.compare_stored()
    stats = pair.sides[0].cache.stats()
    assert stats["host_hit_tokens"] > 0 and stats["restored_blocks"] > 0
