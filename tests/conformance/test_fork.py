"""After fork(): the host's caches go on in the child, apart from the parent's; a device's refuse every call."""

import os
import pickle
import sys
import traceback
import warnings

import numpy as np
import pytest

import pagedkv

from .arrays import for_device
from .caches import ids, make_cache, open_with

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def run_in_child(function):
    """What function() returns in a child of this process, or a failure with the child's traceback."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is what is tested
        child = os.fork()
    if child == 0:
        try:
            result = ("result", function())
        except BaseException:
            result = ("error", traceback.format_exc())
        with open(write_end, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    kind, result = pickle.loads(text)
    assert kind == "result", result
    return result


class World:
    """A cache with a step, and all that can be done with it."""

    def __init__(self, device):
        self.arrays = for_device(device)
        self.cache = make_cache(device, 32)
        self.tokens = ids(range(10))
        self.sequence = self.cache.open(self.tokens)
        self.batch = self.cache.batch(4, 64, num_heads=1, formats=("table", "csr"))
        self.batch.prepare([self.sequence], [10], tokens=self.tokens)
        rows = np.random.default_rng(3).standard_normal((10, 1, 8)).astype(np.float32)
        self.rows = self.arrays.put(rows)
        # A child of a process that used CUDA can ask CuPy nothing about an array, so there it goes by its address.
        self.given = self.rows if device == "host" else (self.rows.data.ptr, self.rows.shape, "float32")
        self.cache.write_kv(0, self.batch, self.given, self.given)
        self.pool = pagedkv.Pool(256, 8, device=device)
        self.blocks = self.pool.allocate(3)

    def calls(self):
        cache, batch, pool = self.cache, self.batch, self.pool
        return {
            "open": lambda: cache.open(self.tokens),
            "append": lambda: self.sequence.append([1]),
            "fork": lambda: self.sequence.fork(),
            "truncate": lambda: self.sequence.truncate(5),
            "prepare": lambda: batch.prepare([self.sequence], [10], tokens=self.tokens),
            "write_kv": lambda: cache.write_kv(0, batch, self.given, self.given),
            "attend": lambda: cache.attend(0, batch, self.given, out=self.given),
            "gather_kv": lambda: cache.gather_kv(0, batch, 0, 0, 10, self.given, self.given),
            "evict": lambda: cache.evict(1),
            "zero_uncached": lambda: cache.zero_uncached(),
            "measure": lambda: cache.measure(),
            "batch": lambda: cache.batch(1, 1),
            "save": lambda: cache.save("/dev/null"),
            "pool.allocate": lambda: pool.allocate(),
            "pool.zero_blocks": lambda: pool.zero_blocks(self.blocks),
            "pool.copy_blocks": lambda: pool.copy_blocks(self.blocks[:1], self.blocks[1:2]),
            "pool.free": lambda: pool.free(self.blocks),
            "Cache": lambda: make_cache(cache.device, 4),
            "Pool": lambda: pagedkv.Pool(256, 4, device=cache.device),
            "device_info": lambda: pagedkv.device_info(cache.device),
        }

    def close(self):
        self.batch.close()
        self.cache.close()
        self.pool.close()


def test_every_call_of_a_device_is_refused_in_the_child(device):
    if device == "host":
        pytest.skip("the host survives a fork: see the other tests")
    world = World(device)

    def child():
        errors = {}
        for name, call in world.calls().items():
            try:
                call()
            except pagedkv.PagedKVError as error:
                errors[name] = (type(error).__name__, str(error))
        usable = pagedkv.cuda_info()["is_usable"]
        world.close()
        return errors, usable, pagedkv.Pool(256, 4, device="host").allocate()

    errors, is_usable, block = run_in_child(child)
    assert set(errors) == set(world.calls()) and not is_usable and block == 0
    for name, (kind, text) in errors.items():
        assert kind in ("DeviceError", "UnsupportedError") and "after fork()" in text, (name, kind, text)
    # The parent has noticed nothing.
    world.sequence.append([1])
    assert world.cache.check()
    np.testing.assert_array_equal(world.arrays.get(world.rows).shape, (10, 1, 8))
    world.close()


def test_the_child_of_a_host_process_goes_on():
    world = World("host")
    before = world.arrays.read_blocks(world.cache)
    table = world.sequence.blocks.tolist()

    def child():
        assert world.sequence.blocks.tolist() == table
        assert np.array_equal(world.arrays.read_blocks(world.cache), before)
        found = world.cache.open(world.tokens)
        assert found.num_cached_tokens == 8
        world.sequence.append(range(20))
        other = world.sequence.fork()
        other.append([7])
        batch = world.cache.batch(1, 30)
        batch.prepare([other], [3])
        rows = np.full((3, 1, 8), 5, np.float32)
        world.cache.write_kv(0, batch, rows, rows)
        np.asarray(world.cache)[:] = 7
        for name, call in world.calls().items():
            if name != "save":
                call()
        assert world.cache.check()
        world.close()
        return True

    assert run_in_child(child)
    # What the child wrote and released is its own.
    assert np.array_equal(world.arrays.read_blocks(world.cache), before)
    assert world.sequence.length == 10 and world.sequence.blocks.tolist() == table
    assert world.cache.stats()["num_sequences"] == 1 and world.cache.check()
    world.sequence.append([1])
    world.close()


def test_kernels_of_the_child_have_threads_of_their_own():
    pagedkv.set_num_threads(4)
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=8, head_dim=64, dtype="float32", block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=256, device="host")
    random = np.random.default_rng(1)
    sequences = [cache.open([]) for _ in range(8)]
    batch = cache.batch(8, 2048)
    batch.prepare(sequences, [200] * 8)
    k, v = (random.standard_normal((1600, 8, 64)).astype(np.float32) for _ in range(2))
    cache.write_kv(0, batch, k, v)
    q = random.standard_normal((1600, 8, 64)).astype(np.float32)
    expected = cache.attend(0, batch, q)
    for _ in range(3):
        assert run_in_child(lambda: all(np.array_equal(cache.attend(0, batch, q), expected) for _ in range(3)))
    assert np.array_equal(cache.attend(0, batch, q), expected)


def test_a_grandchild():
    cache = make_cache("host", 8)
    open_with(cache, range(5))

    def child():
        seq = open_with(cache, range(6))
        grand = run_in_child(lambda: open_with(cache, range(7)).length)
        return seq.length, grand, cache.stats()["num_sequences"]

    assert run_in_child(child) == (6, 7, 1)


def test_a_recording_stays_the_parents(tmp_path):
    path = tmp_path / "calls"
    cache = make_cache("host", 8)
    cache.trace_start(path)
    first = open_with(cache, range(5))

    def child():
        open_with(cache, range(300, 320))
        is_tracing = cache.stats()["is_tracing"]
        with pytest.raises(pagedkv.InvalidArgumentError, match="not being recorded"):
            cache.trace_stop()
        cache.close()
        return is_tracing

    assert run_in_child(child) is False
    assert path.stat().st_size < 4096
    first.close()
    assert cache.stats()["is_tracing"] is True
    cache.trace_stop()
    from pagedkv.cli import main

    assert main(["replay", str(path), "--json", str(tmp_path / "out.json")]) == 0


def test_pages_of_statistics_stay_the_parents(tmp_path):
    cache = make_cache("host", 8)
    path = cache.publish_stats(tmp_path / "page")
    before = open(path, "rb").read()

    def child():
        open_with(cache, range(5))
        own = cache.unpublish_stats()
        cache.publish_stats(tmp_path / "other")
        cache.close()
        return own

    run_in_child(child)
    assert open(path, "rb").read() == before and not (tmp_path / "other").exists()
    cache.close()
    assert not os.path.exists(path)
