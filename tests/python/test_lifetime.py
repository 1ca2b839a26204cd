import copy
import gc
import itertools
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest

import pagedkv


def build(layout):
    cache = pagedkv.Cache(layout, num_blocks=16, device="host")
    sequence = cache.open(range(10))
    batch = cache.batch(4, 64, formats=("table", "csr", "pointers"))
    batch.prepare([sequence], [10], tokens=range(10))
    return cache, sequence, batch


def test_views_outlive_everything(layout):
    cache, sequence, batch = build(layout)
    blocks, table, slots, pointers = sequence.blocks, batch.block_table, batch.slot_mapping, batch.block_pointers
    expected = [view.tolist() for view in (blocks, table, slots, pointers)]
    sequence.close()
    cache.close()
    del cache, sequence, batch
    gc.collect()
    noise = [bytearray(4096) for _ in range(100)]
    assert [view.tolist() for view in (blocks, table, slots, pointers)] == expected
    assert len(noise) == 100


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("how", ["drop", "close"])
def test_any_order_of_destruction(layout, order, how):
    objects = list(build(layout))
    views = [objects[1].blocks, objects[2].block_table]
    for index in order:
        if how == "close":
            try:
                objects[index].close()
            except pagedkv.NotFoundError:
                assert index == 1  # the cache went first
        objects[index] = None
        gc.collect()
    assert views[0].tolist() == views[1][0].tolist()


def test_a_dropped_sequence_is_closed(cache):
    sequence = cache.open(range(10))
    sequence.append(range(10))
    assert cache.num_free_blocks == 13
    child = sequence.fork()
    del sequence
    gc.collect()
    assert cache.num_free_blocks == 13
    assert cache.stats()["num_sequences"] == 1
    del child
    assert cache.num_free_blocks == 16
    assert cache.victims(0) == []


def test_a_sequence_keeps_its_cache(layout):
    sequence = pagedkv.Cache(layout, num_blocks=16, device="host").open(range(10))
    gc.collect()
    sequence.append(range(10))
    assert sequence.length == 10


def test_a_batch_keeps_its_cache(layout):
    batch = pagedkv.Cache(layout, num_blocks=16, device="host").batch(4, 64)
    gc.collect()
    batch.prepare([batch.cache.open([1])], [0])
    assert batch.num_sequences == 1


def test_cycles_are_collected(layout):
    class Cache(pagedkv.Cache):
        pass

    class Request:
        pass

    cache = Cache(layout, num_blocks=16, device="host")
    request = Request()
    request.sequence = cache.open(range(10))
    request.itself = request
    cache.requests = [request]
    cache.batches = [cache.batch(4, 64)]
    reference = weakref.ref(cache)
    del cache, request
    gc.collect()
    assert reference() is None


def test_weak_references(layout, pool):
    for thing in (*build(layout), layout, pool):
        assert weakref.ref(thing)() is thing


@pytest.mark.parametrize("index", range(3))
def test_handles_do_not_pickle_or_copy(layout, index):
    thing = build(layout)[index]
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            call(thing)


def test_pools_do_not_pickle(pool):
    with pytest.raises(TypeError):
        pickle.dumps(pool)


def test_memory_of_a_cache_keeps_it(layout):
    cache, sequence, batch = build(layout)
    memory = np.asarray(cache)
    reference = weakref.ref(cache)
    del cache, sequence, batch
    gc.collect()
    memory[:] = 1
    assert reference() is not None
    del memory
    gc.collect()
    assert reference() is None


def test_close_under_views_changes_nothing(layout):
    cache, sequence, batch = build(layout)
    memory = memoryview(cache)
    with pytest.raises(pagedkv.BusyError, match="view"):
        cache.close()
    with pytest.raises(pagedkv.BusyError), cache:
        pass
    assert sequence.length == 10
    batch.prepare([sequence], [1], tokens=[3])
    memory.release()
    cache.close()


def test_a_failed_constructor_leaves_nothing(layout):
    memory = bytearray(100)
    for _ in range(3):
        with pytest.raises(pagedkv.PagedKVError):
            pagedkv.Pool(256, buffer=memory)
        with pytest.raises(pagedkv.PagedKVError):
            pagedkv.Cache(layout, buffer=memory)
    gc.collect()
    memory.append(1)  # BufferError if it were still held


def test_adopted_memory_is_held(layout):
    memory = bytearray(20 * layout.block_bytes)
    cache = pagedkv.Cache(layout, buffer=memory)
    with pytest.raises(BufferError):
        memory.append(1)
    cache.close()
    memory.append(1)


def test_interpreter_shutdown():
    """Objects that live until the end, in modules, cycles and threads, are torn down quietly."""
    code = """
import numpy as np, pagedkv, sys, threading
layout = pagedkv.Layout(1, 1, 8, dtype="float32", block_size=4)
cache = pagedkv.Cache(layout, num_blocks=16)
sequences = [cache.open(range(5)) for _ in range(3)]
batch = cache.batch(4, 64)
batch.prepare(sequences, [5] * 3, tokens=list(range(5)) * 3)
table, memory, pool = batch.block_table, np.asarray(cache), pagedkv.Pool(256, 4)
class Holder: pass
holder = Holder(); holder.itself = holder; holder.things = (cache, sequences[0], batch, table)
sys.kept = holder
threading.Thread(target=lambda: sequences[1].length).start()
"""
    run = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
