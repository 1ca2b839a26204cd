"""Caches and pools that grow and shrink while they are in use: K and V of every token are compared after each step."""
import threading

import numpy as np
import pytest

import pagedkv
from pagedkv.cli.recording import Recording

from . import arrays
from .caches import ids, make_cache, open_with, refused
from .marked import MarkedCache

EVICTIONS = ["lru", "lfu", "fifo", "slru", "s3fifo", "priority"]
MIB = 1 << 20


def make_rng(seed):
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def hold_high(marked, num_blocks):
    """A sequence whose blocks are the last ones, and the others free: [first held block, ...]."""
    filler = marked.open_with(range(1000, 1000 + 4 * (marked.cache.num_blocks - num_blocks)))
    held = marked.open_with(range(4 * num_blocks))
    filler.seq.close()
    marked.cache.evict(marked.cache.num_free_blocks)
    return held


def test_grow(device):
    marked = MarkedCache(device, num_blocks=4, max_num_blocks=12)
    cache = marked.cache
    assert (cache.num_blocks, cache.max_num_blocks) == (4, 12)
    seq = marked.open_with(range(16))
    address, generation = cache.block_ptr(3), marked.batch.generation
    with refused(cache, pagedkv.NeverFitsError, seq.seq):  # not in the pool as it is
        seq.seq.append([1])
    cache.resize(9)
    assert (cache.num_blocks, cache.num_free_blocks, cache.block_ptr(3)) == (9, 5, address)
    assert cache.stats()["num_blocks"] == 9 and cache.stats()["max_num_blocks"] == 12
    assert cache.block_ptr(8) == address + 5 * cache.layout.block_bytes
    cache.discard(marked.batch)  # growing leaves steps as they are
    assert seq.seq.length == 0 and marked.batch.generation == generation
    seq.cut(0)
    marked.step([(seq, list(range(36)))])
    marked.check([seq])
    assert cache.num_free_blocks == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_shrink_moves_what_is_held(device, num_blocks):
    marked = MarkedCache(device, num_blocks=16, max_num_blocks=16, event_capacity=100)
    cache = marked.cache
    held = hold_high(marked, num_blocks)
    assert min(held.seq.blocks) >= num_blocks
    table = held.seq.blocks
    cache.read_events()
    with refused(cache, pagedkv.BusyError, held.seq):
        cache.resize(num_blocks)
    if num_blocks > 1:
        with refused(cache, pagedkv.OutOfBlocksError, held.seq) as record:
            cache.resize(num_blocks - 1, move=True)
        assert (record.value.needed, record.value.available) == (num_blocks, num_blocks - 1)
    cache.resize(num_blocks, move=True)
    assert (cache.num_blocks, cache.num_free_blocks) == (num_blocks, 0)
    assert cache.stats()["moved_blocks"] == num_blocks
    assert sorted(held.seq.blocks.tolist()) == list(range(num_blocks))
    assert np.shares_memory(table, held.seq.blocks)  # a view follows
    events = cache.read_events()
    assert set(events["kind"]) == {3} and sorted(events["block"]) == list(range(num_blocks))
    marked.check([held])
    held.seq.close()
    marked.check([marked.open(held.tokens + [7])])  # still found
    with pytest.raises(pagedkv.InvalidArgumentError):
        cache.block_ptr(num_blocks)


def test_shrink_without_moving_evicts_the_tail(device):
    marked = MarkedCache(device, num_blocks=8, max_num_blocks=8)
    cache = marked.cache
    low = marked.open_with(range(8))
    marked.open_with(range(100, 116)).seq.close()
    assert max(low.seq.blocks) < 2 and cache.num_cached_blocks == 4
    before = cache.stats()
    cache.resize(4)
    assert cache.num_blocks == 4 and cache.num_cached_blocks == 2
    assert cache.stats()["evictions"] - before["evictions"] == 2
    assert cache.stats()["moved_blocks"] == 0
    marked.check([low])


def test_shrink_keeps_the_better_half(device):
    """With move, what the policy values most stays cached, wherever it stands."""
    marked = MarkedCache(device, num_blocks=8, max_num_blocks=8)
    old, new = list(range(16)), list(range(50, 66))
    marked.open_with(old).seq.close()
    marked.open_with(new).seq.close()
    marked.cache.resize(4, move=True)
    assert marked.cache.num_cached_blocks == 4
    assert marked.cache.probe(old + [0]) == 0 and marked.cache.probe(new + [0]) == 16
    marked.check([marked.open(new + [0])])


@pytest.mark.parametrize("move", [False, True])
def test_steps_before_a_shrink_are_stale(device, move):
    marked = MarkedCache(device, num_blocks=8, max_num_blocks=8)
    cache, batch = marked.cache, marked.batch
    seq = marked.open_with(range(6))
    generation = batch.generation
    cache.resize(4, move=move)
    assert batch.generation != generation
    rows = marked.arrays.put(np.zeros((6, 2, 16), np.float32))
    values = marked.arrays.put(np.zeros((6, 2, 8), np.float32))
    with refused(cache, pagedkv.InvalidArgumentError, seq.seq) as record:
        cache.discard(batch)
    assert "shrunk" in str(record.value)
    for call in (lambda: cache.write_kv(0, batch, rows, values), lambda: cache.attend(0, batch, rows, out=values),
                 lambda: cache.gather_kv(0, batch, 0, 0, 6, k=rows, v=values),
                 lambda: cache.scatter_kv(0, batch, 0, 0, rows, values)):
        with refused(cache, pagedkv.InvalidArgumentError, seq.seq):
            call()
    generation = batch.generation
    marked.step([(seq, [9])])
    assert batch.generation == generation
    marked.check([seq])


@pytest.mark.parametrize("formats", [("table",), ("csr", "pointers")])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_under_load(device, eviction, formats):
    rng = make_rng([EVICTIONS.index(eviction), len(formats)])
    marked = MarkedCache(device, num_blocks=24, max_num_blocks=40, eviction=eviction, formats=formats, event_capacity=4096,
                         partial_reuse=True)
    cache, open_now, found, sizes = marked.cache, [], {}, set()
    for _ in range(120):
        kind = rng.integers(8)
        prompt = [int(rng.integers(3))] * int(rng.integers(1, 20)) + rng.integers(0, 3, rng.integers(0, 8)).tolist()
        try:
            if kind <= 2 and len(open_now) < 8:
                sequence = marked.open(prompt, priority=int(rng.integers(3)))
                open_now.append(sequence)
                marked.step([(sequence, prompt[len(sequence.tokens):])])
            elif kind == 3 and open_now:
                marked.step([(sequence, [int(rng.integers(3))]) for sequence in open_now])
            elif kind == 4 and open_now and len(open_now) < 8:
                parent = open_now[rng.integers(len(open_now))]
                open_now.append(parent.copy(parent.seq.fork()))
            elif kind == 5 and open_now:
                open_now.pop(rng.integers(len(open_now))).seq.close()
            else:
                cache.resize(int(rng.integers(8, 41)), move=bool(rng.integers(3)))
        except (pagedkv.OutOfBlocksError, pagedkv.BusyError, pagedkv.NeverFitsError):
            pass
        sizes.add(cache.num_blocks)
        marked.check(open_now)
        follow_events(cache, found)
        if "pointers" in formats:
            pointers = marked.batch.block_pointers
            assert len(pointers) == cache.num_blocks
            assert pointers[-1] == cache.block_ptr(cache.num_blocks - 1)
    assert len(sizes) > 5 and cache.stats()["moved_blocks"] > 0
    assert all(0 <= block < cache.num_blocks for block in found.values())
    cache.close_many([sequence.seq for sequence in open_now])


def follow_events(cache, found):
    for event in cache.read_events():
        if event["kind"] == 2:
            assert found.pop(bytes(event["hash"])) == event["block"]
        else:
            assert (bytes(event["hash"]) in found) == (event["kind"] == 3)
            found[bytes(event["hash"])] = int(event["block"])


def test_what_names_blocks_moves_along(device):
    """Pins, quotas, hints with a deadline, hits inside a block, snapshots."""
    marked = MarkedCache(device, num_blocks=16, max_num_blocks=16, partial_reuse=True, eviction="priority")
    cache = marked.cache
    cache.set_quota(5, 4)
    filler = marked.open_with(range(500, 516))
    held = marked.open_with(range(16), namespace=5)
    held.seq.retain(0, 8, priority=3, ttl=0.05)
    cached = list(range(100, 110))
    marked.open_with(cached).seq.close()  # two full blocks
    with cache.pin(cached) as pin:
        filler.seq.close()
        cache.resize(7, move=True)
        assert cache.check() and pin.num_tokens == 8 and cache.stats()["pinned_blocks"] == 2
        assert cache.namespace_stats(5)["held_blocks"] == 4
        with refused(cache, pagedkv.NeverFitsError, held.seq):
            held.seq.append([1])
        cache.evict(cache.num_free_blocks)
        assert cache.probe(cached) == 8
        hit = marked.open(cached[:6] + [7, 7])  # four tokens and two of the next block
        assert hit.seq.length == 6
        marked.check([hit, held])
        hit.seq.close()
    cached_before = cache.namespace_stats(5)["cached_blocks"]
    held.seq.close()
    assert cache.namespace_stats(5)["cached_blocks"] == cached_before + 4
    threading.Event().wait(0.06)
    cache.evict(0)  # the hint ends
    assert cache.check() and not any(cache.explain(block).get("has_hint") for block in range(cache.num_blocks))
    cache.resize(3, move=True)
    assert cache.check()


def test_duplicates_and_sliding_windows_move(device):
    marked = MarkedCache(device, num_blocks=16, max_num_blocks=16, window=8, sinks=4)
    filler = marked.open_with(range(700, 720))
    twins = [marked.open([1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(2)]
    marked.step([(twin, list(range(1, 9))) for twin in twins])
    long = marked.open(range(300, 304))
    for token in range(300, 330):
        marked.step([(long, [token])])
    assert (long.seq.blocks < 0).any()
    filler.seq.close()
    marked.cache.resize(9, move=True)
    marked.check([*twins, long])
    twins[0].seq.close()
    marked.check([twins[1], long])
    marked.step([(long, [5] * 9), (twins[1], [3])])
    marked.check([twins[1], long])


def test_refusals(device):
    with make_cache(device, num_blocks=8, max_num_blocks=12) as cache:
        for bad in (0, -1, 2.5, "8", None, 2**31, 2**63):
            with refused(cache, pagedkv.InvalidArgumentError):
                cache.resize(bad)
            with refused(cache, pagedkv.InvalidArgumentError):
                cache.prepare_resize(bad)
        with refused(cache, pagedkv.UnsupportedError) as record:
            cache.resize(13)
        assert "max_num_blocks 12" in str(record.value)
        if device == "host":
            memory = np.asarray(cache)
            with refused(cache, pagedkv.BusyError):
                cache.resize(9)
            del memory
        cache.resize(8)
        cache.resize(8, move=True)
    for bad in (0, -1, 7, 2**31, "8"):
        with pytest.raises(pagedkv.InvalidArgumentError):
            make_cache(device, num_blocks=8, max_num_blocks=bad)
        with pytest.raises(pagedkv.InvalidArgumentError):
            pagedkv.Pool(256, 8, device=device, max_num_blocks=bad)


def test_without_room(device):
    """Memory that was made without room to grow: the host's may shrink and grow again, a device's stays as it is."""
    with make_cache(device, num_blocks=8) as cache:
        assert cache.max_num_blocks == 8
        with refused(cache, pagedkv.UnsupportedError):
            cache.resize(9)
        if device == "host":
            cache.resize(3)
            cache.resize(8)
        else:
            with refused(cache, pagedkv.UnsupportedError):
                cache.resize(3)
            with pagedkv.Pool(256, 8, device=device) as pool, pytest.raises(pagedkv.UnsupportedError):
                pool.resize(4)


def test_adopted_memory_stays():
    memory = np.zeros(1 << 16, np.uint8)
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    with pagedkv.Cache(layout, num_blocks=4, device="host", buffer=memory) as cache:
        for num_blocks in (2, 4):
            with refused(cache, pagedkv.UnsupportedError):
                cache.resize(num_blocks)
    with pytest.raises(pagedkv.InvalidArgumentError):
        pagedkv.Cache(layout, num_blocks=4, device="host", buffer=memory, max_num_blocks=8)


def test_two_phases(device):
    marked = MarkedCache(device, num_blocks=4, max_num_blocks=32)
    cache = marked.cache
    seq = marked.open_with(range(12))
    with cache.prepare_resize(16) as prepared:
        assert repr(prepared) == "<pagedkv.PreparedResize to 16 blocks, prepared>"
        assert cache.num_blocks == 4 and not prepared.is_committed
        marked.step([(seq, [1, 2])])  # the cache goes on
        with refused(cache, pagedkv.BusyError):
            cache.prepare_resize(8)
        with refused(cache, pagedkv.BusyError):
            cache.resize(8)
        prepared.commit()
        assert prepared.is_committed and prepared.num_blocks == cache.num_blocks == 16
        with pytest.raises(pagedkv.InvalidArgumentError, match="committed"):
            prepared.commit()
    prepared.close()
    with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
        prepared.commit()
    marked.step([(seq, list(range(30)))])
    marked.check([seq])
    prepared = cache.prepare_resize(32)
    prepared.close()  # undone
    assert cache.num_blocks == 16 and repr(prepared) == "<pagedkv.PreparedResize to 32 blocks, closed>"
    prepared = cache.prepare_resize(4)
    with refused(cache, pagedkv.BusyError):
        prepared.commit()
    with refused(cache, pagedkv.OutOfBlocksError):
        prepared.commit(move=True)
    seq.seq.truncate(10)
    seq.cut(10)
    prepared.commit(move=True)
    marked.check([seq])
    cache.close()
    prepared.close()  # keeps what it needs


def test_prepare_in_another_thread(device):
    """While one thread prepares resizes the other one steps, and commits what is ready between two steps."""
    marked = MarkedCache(device, num_blocks=16, max_num_blocks=64)
    cache, ready, committed = marked.cache, threading.Event(), threading.Event()
    box, errors = [], []

    def prepare_all():
        try:
            for num_blocks in (64, 20, 40, 16, 64, 16):
                with cache.prepare_resize(num_blocks) as prepared:
                    box.append(prepared)
                    ready.set()
                    assert committed.wait(60)
                    committed.clear()
        except BaseException as error:
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=prepare_all)
    sequences = [marked.open_with([100 + i] * 5) for i in range(3)]
    thread.start()
    num_committed = 0
    while num_committed < 6 and not errors:
        marked.step([(sequence, [1]) for sequence in sequences])
        if sequences[0].seq.length > 15:
            cache.truncate_many([sequence.seq for sequence in sequences], [6] * 3)
            for sequence in sequences:
                sequence.cut(6)
        if ready.is_set():
            ready.clear()
            box.pop().commit(move=True)
            num_committed += 1
            committed.set()
            marked.check(sequences)
    thread.join()
    assert not errors and num_committed == 6
    marked.check(sequences)


def test_pool_under_load(device):
    rng = make_rng(11)
    memory_of = arrays.for_device(device)
    pool = pagedkv.Pool(1024, 8, device=device, max_num_blocks=64)
    owned, base = {}, pool.base_ptr
    for step in range(150):
        kind = rng.integers(3)
        if kind == 0 and pool.num_free:
            memory = memory_of.read_blocks(pool)
            for block in pool.allocate(int(rng.integers(1, pool.num_free + 1))):
                memory[block] = owned[int(block)] = step % 251
            memory_of.write_blocks(pool, memory)
        elif kind == 1 and owned:
            block = int(rng.choice(sorted(owned)))
            pool.free(block)
            del owned[block]
        else:
            num_blocks = int(rng.integers(1, 65))
            if any(block >= num_blocks for block in owned):
                with pytest.raises(pagedkv.BusyError):
                    pool.resize(num_blocks)
            else:
                pool.resize(num_blocks)
                assert pool.num_blocks == num_blocks
        assert pool.num_free == pool.num_blocks - len(owned) and pool.base_ptr == base
        memory = memory_of.read_blocks(pool)
        assert all((memory[block] == value).all() for block, value in owned.items())
        del memory
    with pytest.raises(pagedkv.InvalidArgumentError):
        pool.resize(2**31)


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("kind", ["pool", "cache"])
def test_memory_goes_back(device, kind):
    """What is cut off is the system's again: by the process's resident size, or the device's free memory."""
    num_blocks, kept = 192, 32
    if kind == "pool":
        owner = pagedkv.Pool(MIB, num_blocks, device=device, max_num_blocks=2 * num_blocks)
    else:
        layout = pagedkv.Layout(num_layers=1, num_kv_heads=8, head_dim=128, dtype="float32", block_size=128)
        owner = pagedkv.Cache(layout, num_blocks=num_blocks, device=device, max_num_blocks=2 * num_blocks)
        assert layout.block_bytes == MIB

    def used():
        return resident_bytes() if device == "host" else -pagedkv.device_info(device)["free_bytes"]

    if device == "host":
        np.asarray(owner)[:] = 1
    full = used()
    owner.resize(kept)
    gone = full - used()
    assert gone > 0.9 * (num_blocks - kept) * MIB
    owner.resize(num_blocks)
    if device == "host":
        memory = np.asarray(owner)
        assert (memory[:kept] == 1).all() and not memory[kept:].any()
        memory[:] = 2
        del memory
    assert used() > full - 0.1 * (num_blocks - kept) * MIB
    owner.close()


def test_recordings_have_resizes(tmp_path, device):
    path = tmp_path / "calls"
    cache = make_cache(device, num_blocks=8, max_num_blocks=16)
    cache.trace_start(path)
    with open_with(cache, range(30)) as seq:
        cache.resize(16)
        seq.append(ids(range(20)))
        for call in (lambda: cache.resize(9), lambda: cache.resize(9, move=True)):
            with pytest.raises((pagedkv.BusyError, pagedkv.OutOfBlocksError)):
                call()
        seq.truncate(20)
        with cache.prepare_resize(5) as prepared:
            prepared.commit(move=True)
    cache.trace_stop()
    resizes = [(record.fields, record.status) for record in Recording(path) if record.name == "resize"]
    assert resizes == [([16, 0], 0), ([9, 0], 6), ([9, 1], 4), ([5, 1], 0)]


def test_steps_ahead_before_a_shrink_are_stale(device):
    with make_cache(device, num_blocks=16, max_num_blocks=16) as cache:
        seq = open_with(cache, range(4))
        batch = cache.batch(max_sequences=2, max_tokens=4, max_sequence_length=40)
        batch.prepare([seq], [1], tokens=[4], steps_ahead=3)
        batch.advance()
        cache.resize(8, move=True)
        for call in (batch.advance, batch.get_advanced, lambda: batch.settle([1], tokens=[5]), lambda: batch.settle([0])):
            with refused(cache, pagedkv.InvalidArgumentError, seq) as record:
                call()
            assert "shrunk" in str(record.value)
        batch.prepare([seq], [1], tokens=[5], steps_ahead=3)
        batch.advance()
        cache.resize(16)  # growing leaves them as they are
        batch.advance()
        batch.settle([2], tokens=[6, 7])
        assert seq.length == 8
        cache.check()


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("tier_min_hits", [0, 1])
def test_tiers_stay(device, move, tier_min_hits):
    """What a shrink evicts is offloaded and found again, what moves is found where it is, and so is a preempted sequence."""
    plain = MarkedCache(device, num_blocks=1)
    marked = MarkedCache(device, num_blocks=16, max_num_blocks=16, host_tier=32 * plain.format.block_bytes,
                         tier_min_hits=tier_min_hits)
    cache = marked.cache
    prompts = [list(range(100 * i, 100 * i + 13)) for i in range(1, 6)]
    for prompt in prompts:
        marked.open_with(prompt).seq.close()
        marked.open(prompt).seq.close()  # a hit
    held = marked.open_with(range(8))
    preempted = marked.open_with(range(50, 57))
    preempted.seq.offload()
    num_offloaded = cache.stats()["offloaded_blocks"]
    try:
        cache.resize(6, move=move)
    except pagedkv.BusyError:
        assert not move
        cache.resize(6, move=True)
    assert cache.stats()["offloaded_blocks"] > num_offloaded
    cache.check()
    marked.check([held])
    preempted.seq.restore()
    marked.step([(preempted, [7])])
    marked.check([preempted])
    preempted.seq.close()
    for prompt in prompts:
        again = marked.open(prompt)
        assert again.seq.length == 12
        marked.step([(again, prompt[12:])])
        marked.check([again, held])
        again.seq.close()
    cache.resize(16)
    cache.check()
    assert marked.open(prompts[0]).seq.length == 12
