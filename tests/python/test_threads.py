import gc
import threading

import numpy as np
import pytest

import pagedkv


def run_threads(*targets):
    errors = []

    def guard(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_pool_from_many_threads():
    pool = pagedkv.Pool(256, 64, device="host")

    def work():
        for _ in range(300):
            try:
                blocks = pool.allocate(5)
            except pagedkv.OutOfBlocksError:
                continue
            pool.retain(blocks)
            pool.copy_blocks(blocks[:2], blocks[2:4])
            pool.free(blocks)
            pool.free(blocks)

    run_threads(*[work] * 4)
    assert pool.num_free == 64
    stats = pool.stats()
    assert stats["allocations"] == stats["frees"]


def test_errors_belong_to_their_thread():
    pool = pagedkv.Pool(256, 4, device="host")

    def work(block):
        def loop():
            for _ in range(300):
                with pytest.raises(pagedkv.InvalidArgumentError, match=str(block)):
                    pool.free([block])

        return loop

    run_threads(*[work(block) for block in (1001, 2002, 3003, 4004)])


class Reentrant:
    """A count whose reading runs Python code in the middle of prepare."""

    def __init__(self, action):
        self.action = action

    def __index__(self):
        self.action()
        return 1


def test_a_second_mutation_is_busy(cache):
    """Deterministic stand-in for a second thread: another call while prepare is on its way."""
    sequence, other = cache.open([1]), cache.open([2])
    batch, second = cache.batch(4, 64), cache.batch(4, 64)
    second.prepare([other], [1], tokens=[2])
    row = np.zeros((1, 2, 16), np.float32)
    seen = []

    def expect_busy(call):
        def action():
            with pytest.raises(pagedkv.BusyError):
                call()
            seen.append(call)

        batch.prepare([sequence], [Reentrant(action)], tokens=[1])

    calls = [
        lambda: cache.open([1]), lambda: cache.evict(0), lambda: cache.victims(0), cache.reset, cache.check,
        cache.close, lambda: cache.explain(0), lambda: cache.batch(1, 1), lambda: cache.discard(second),
        lambda: other.append([1]), lambda: other.fork(), lambda: other.truncate(0), lambda: other.reserve(1),
        lambda: other.commit([]), lambda: other.rematch([2]), other.close, lambda: other.length, lambda: other.blocks,
        lambda: second.prepare([other], [1]), lambda: batch.prepare([other], [1]), batch.close,
        lambda: batch.num_tokens, lambda: batch.block_table, lambda: cache.attend(0, batch, row),
        lambda: cache.write_kv(0, batch, row, row), lambda: cache.set_kv_scales(0, 1.0, 1.0),
    ]  # fmt: skip
    for call in calls:
        expect_busy(call)
    assert len(seen) == len(calls)
    assert sequence.length == len(calls)

    def allowed():
        assert cache.stats()["num_sequences"] == 2
        assert cache.num_free_blocks > 0
        assert "Cache" in repr(cache)
        assert "being prepared" in repr(batch)
        assert "in a step" in repr(other)
        cache.write_kv(0, second, row, row)
        cache.attend(0, second, row)
        assert second.seq_lens.tolist() == [1]
        assert cache.block_ptr(0) == cache.base_ptr

    batch.prepare([sequence], [Reentrant(allowed)], tokens=[1])


def test_a_sequence_dropped_while_busy_is_closed_later(cache):
    sequence = cache.open([1])
    dropped = [cache.open([k]) for k in range(40)]
    for other in dropped[:5]:
        other.append([7])
    held = cache.stats()["held_blocks"]
    batch = cache.batch(4, 64)

    def drop():
        del other_reference[:]
        dropped.clear()
        gc.collect()
        assert cache.stats()["num_sequences"] == 41

    other_reference = [other]
    del other
    batch.prepare([sequence], [Reentrant(drop)], tokens=[1])
    stats = cache.stats()
    assert (stats["num_sequences"], stats["held_blocks"]) == (1, held - 5 + 1)
    assert cache.check()


def test_a_failure_in_prepare_ends_the_busy_time(cache):
    sequence = cache.open([1])
    batch = cache.batch(4, 64)

    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        batch.prepare([sequence], [Reentrant(fail)])
    batch.prepare([sequence], [1])
    assert sequence.length == 1


def test_statistics_while_another_thread_works(cache):
    done = threading.Event()

    def mutate():
        try:
            batch = cache.batch(4, 64)
            for turn in range(300):
                with cache.open(range(turn, turn + 20)) as sequence:
                    batch.prepare([sequence], [20 - sequence.length], tokens=range(turn + sequence.length, turn + 20))
        finally:
            done.set()

    def watch():
        while not done.is_set():
            stats = cache.stats()
            blocks = sum(stats[state + "_blocks"] for state in ("uncached", "cached", "held", "pending"))
            assert blocks == stats["num_blocks"]

    run_threads(mutate, watch, watch)


def test_kernels_beside_a_mutation(layout):
    """attend in two threads on their own batches, while a third one opens, steps and closes."""
    with pagedkv.Cache(layout, num_blocks=256, device="host") as cache:
        random = np.random.default_rng(11)
        steps = []
        for index in range(2):
            sequence = cache.open(np.arange(100) + 1000 * index)
            batch = cache.batch(1, 100)
            batch.prepare([sequence], [100])
            k = random.standard_normal((100, 2, 16)).astype(np.float32)
            cache.write_kv(0, batch, k, k)
            steps.append((sequence, batch, random.standard_normal((100, 4, 16)).astype(np.float32)))

        def attend(batch, q):
            def loop():
                expected = cache.attend(0, batch, q)
                for _ in range(30):
                    np.testing.assert_array_equal(cache.attend(0, batch, q), expected)

            return loop

        def mutate():
            batch = cache.batch(4, 64)
            for turn in range(200):
                with cache.open([turn] * 30) as sequence:
                    batch.prepare([sequence], [30 - sequence.length])

        run_threads(*[attend(batch, q) for _, batch, q in steps], mutate)


def test_close_while_kernels_run(layout):
    """close() waits for nobody: it is refused, or comes after the kernel."""
    cache = pagedkv.Cache(layout, num_blocks=256, device="host")
    sequence = cache.open([1])
    batch = cache.batch(1, 512)
    batch.prepare([sequence], [512])
    q = np.ones((512, 4, 16), np.float32)
    started = threading.Event()

    def attend():
        for _ in range(20):
            started.set()
            try:
                cache.attend(0, batch, q)
            except pagedkv.InvalidArgumentError as error:
                assert "closed" in str(error)

    def close():
        started.wait()
        while True:
            try:
                return cache.close()
            except pagedkv.BusyError:
                pass

    run_threads(attend, close)
    assert repr(cache) == "<pagedkv.Cache closed>"
