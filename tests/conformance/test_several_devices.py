"""One cache over several devices gives what a cache of one device gives: block ids, tables, outputs, stored rows."""
import io

import numpy as np
import pytest

import pagedkv

from .several_devices import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, Pair, Side, devices, shard  # noqa: F401


KINDS = {
    "float32": {},
    "head_token": {"dtype": "bfloat16", "layout": {"order": "head_token"}},
    "static scales": {"dtype": "int8"},
    "scales in the block": {"dtype": "int8", "layout": {"kv_scales": "token_head"}},
}


def open_both(pair, tokens):
    pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
    lengths = {side.sequences[-1].length for side in pair.sides}
    assert len(lengths) == 1
    return lengths.pop()


def test_what_each_device_holds(shard):
    cache = Side(["host:0", "host:1", "host:2"], shard).cache
    assert cache.devices == ("host:0", "host:1", "host:2") and cache.shard == shard and cache.device == "host:0"
    ranges = [(part["first_layer"], part["num_layers"], part["first_kv_head"], part["num_kv_heads"])
              for part in cache.shards]
    if shard == "heads":
        assert ranges == [(0, 8, 0, 2), (0, 8, 2, 2), (0, 8, 4, 2)]
    else:  # 8 over 3: the first two have one more
        assert ranges == [(0, 3, 0, 6), (3, 3, 0, 6), (6, 2, 0, 6)]
    assert len({part["base_ptr"] for part in cache.shards}) == 3
    assert sum(part["block_bytes"] for part in cache.shards) == cache.layout.block_bytes
    assert cache.block_ptr(3) == cache.shards[0]["base_ptr"] + 3 * cache.shards[0]["block_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_forks_copies_and_cuts(devices, shard, kind):
    pair = Pair(devices, shard, **KINDS[kind])
    if kind == "static scales":
        for layer in range(NUM_LAYERS):
            scales = 0.02 + 0.001 * layer + 0.003 * np.arange(NUM_KV_HEADS, dtype=np.float32)
            for side in pair.sides:
                side.cache.set_kv_scales(layer, scales, 2 * scales)
    open_both(pair, range(10))
    open_both(pair, range(50, 57))
    assert pair.step([0, 1], [10, 7], [*range(10), *range(50, 57)])
    pair.each(lambda side: side.sequences.append(side.sequences[0].fork()))
    assert pair.step([2, 0, 1], [2, 1, 3], [100, 101, 102, 103, 104, 105])  # the fork copies on write
    assert pair.sides[0].cache.stats()["copies"] == 1
    pair.each(lambda side: side.sequences[0].truncate(6))
    assert pair.step([0, 2], [5, 1], [200, 201, 202, 203, 204, 205])
    assert open_both(pair, [*range(8), 3, 4]) == 8  # a hit
    assert pair.step([3], [2], [3, 4])
    pair.compare_stored()
    pair.check()


def test_rows_that_move(devices, shard):
    """shift, with K rotated, and accept, on every device."""
    pair = Pair(devices, shard, rope=pagedkv.Rope(base=100.0))
    open_both(pair, range(18))
    assert pair.step([0], [18], list(range(18)))
    pair.each(lambda side: side.sequences.append(side.sequences[0].fork()))
    pair.each(lambda side: side.sequences[0].shift(3, 6))
    pair.compare_stored()
    assert pair.step([0, 1], [6, 6], [-1] * 12, register=False)
    pair.each(lambda side: side.cache.accept(side.sequences[:2], [6, 6], [[1, 2, 5], [0, 4]]))
    assert pair.step([1, 0], [1, 1], [-1, -1])
    pair.compare_stored()
    pair.check()


def test_zeroed_blocks(devices, shard):
    pair = Pair(devices, shard, num_blocks=8)
    open_both(pair, range(12))
    assert pair.step([0], [12], list(range(12)), register=False)
    pair.each(lambda side: side.sequences.pop().close())
    assert pair.same(lambda side: side.cache.zero_uncached()) == 8
    open_both(pair, range(12))
    pair.each(lambda side: side.batch.prepare(side.sequences, [12]))
    for layer in range(NUM_LAYERS):
        for side in pair.sides:
            assert not any(rows.any() for rows in side.gather(layer, 0, 12))


def test_rows_out_and_back(devices, shard):
    pair = Pair(devices, shard)
    open_both(pair, range(9))
    assert pair.step([0], [9], list(range(9)))
    rows = pair.rng.standard_normal((3, NUM_KV_HEADS, HEAD_DIM), np.float32)
    for layer in (0, 4, NUM_LAYERS - 1):
        for side in pair.sides:
            for index, heads in side.holders(layer):
                put = side.arrays[index].put
                side.cache.scatter_kv(layer, side.batch, 0, 5, put(rows[:, heads]), put(-rows[:, heads]), shard=index)
    pair.compare_stored()
    k, v = pair.sides[0].gather(4, 0, 9)
    np.testing.assert_array_equal(k[5:8], rows)
    np.testing.assert_array_equal(v[5:8], -rows)


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_are_of_the_whole_model(devices, shard, kind):
    """The same bytes as of one device, and loadable either way."""
    pair = Pair(devices, shard, **KINDS[kind])
    open_both(pair, range(14))
    assert pair.step([0], [14], list(range(14)))
    for method in ("sequence", "prefixes"):
        files = []
        for side in pair.sides:
            file = io.BytesIO()
            if method == "sequence":
                side.sequences[0].save(file)
            else:
                side.cache.save(file)
            files.append(file.getvalue())
        assert files[0] == files[1]
        loaded = Pair(devices, shard, **KINDS[kind])
        for side, data in zip(loaded.sides, reversed(files)):
            if method == "sequence":
                side.sequences.append(side.cache.load_sequence(io.BytesIO(data)))
            else:
                assert side.cache.load(io.BytesIO(data)) == 3
                side.sequences.append(side.cache.open(range(14)))
                assert side.sequences[0].length == 12
        loaded.compare_stored()
        length = loaded.sides[0].sequences[0].length
        loaded.sides[1] = pair.sides[1]
        pair.sides[1].sequences[0].truncate(length)
        loaded.compare_stored()


def test_a_failed_step_is_taken_back(devices, shard):
    pair = Pair(devices, shard)
    open_both(pair, range(6))
    assert pair.step([0], [6], list(range(6)))
    pair.each(lambda side: side.batch.prepare(side.sequences, [5], tokens=range(6, 11)))
    pair.each(lambda side: side.cache.discard(side.batch))
    assert pair.step([0], [5], list(range(20, 25)))
    pair.compare_stored()
    pair.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(devices, shard, seed):
    """Few blocks, many sequences: evictions, refusals and copies must fall alike."""
    pair = Pair(devices, shard, seed, num_blocks=24, layout={"num_layers": 3})
    rng = np.random.default_rng(1000 + seed)
    for _ in range(60):
        sequences = pair.sides[0].sequences
        what = rng.integers(8)
        if what <= 1 or not sequences:
            open_both(pair, (rng.integers(2) * 1000 + np.arange(rng.integers(1, 20))).tolist())
            continue
        i = int(rng.integers(len(sequences)))
        if what == 2:
            pair.each(lambda side, i=i: side.sequences.append(side.sequences[i].fork()))
        elif what == 3:
            length = int(rng.integers(sequences[i].length + 1))
            pair.each(lambda side, i=i, length=length: side.sequences[i].truncate(length))
        elif what == 4:
            pair.each(lambda side, i=i: side.sequences.pop(i).close())
        else:
            chosen = rng.permutation(len(sequences))[:3].tolist()
            counts = rng.integers(0, 7, len(chosen)).tolist()
            pair.step(chosen, counts, rng.integers(0, 3, sum(counts)).tolist())
        if len(sequences) > 8:
            pair.each(lambda side: side.sequences.pop(0).close())
    pair.check()


def test_streams_are_one_of_each_device(devices):
    side = Side(devices[0], "heads")
    seq = side.cache.open(range(5))
    streams = [0] * len(devices[0])
    side.batch.prepare([seq], [5], tokens=range(5), stream=streams)
    seq.append([5, 6], stream=streams)
    seq.append([7], stream=None)
    assert side.cache.zero_uncached(stream=streams) > 0
    side.cache.save(io.BytesIO(), stream=streams)
    for wrong in ([0], streams + [0], 5, [0, "stream", 0][: len(streams)]):
        with pytest.raises(pagedkv.InvalidArgumentError, match="stream"):
            seq.append([9], stream=wrong)
    assert seq.length == 8
    seq.close(stream=streams)
    plain = Side(devices[1])
    seq = plain.cache.open(range(5))
    with pytest.raises(pagedkv.InvalidArgumentError, match="stream must be an int"):
        seq.append(range(5), stream=[0])  # of one device there is no list


def test_device_tables(devices, shard):
    pair = Pair(devices, shard)
    open_both(pair, range(9))
    assert pair.step([0], [9], list(range(9)))
    side = pair.sides[0]
    for name in ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "positions", "indptr", "indices",
                 "last_block_len"):
        tables = getattr(side.batch, f"device_{name}")
        assert isinstance(tables, tuple) and len(tables) == len(devices[0])
        for table, arrays in zip(tables, side.arrays):
            table = table if pair.is_exact else arrays.cupy.asarray(table)
            np.testing.assert_array_equal(arrays.get(table), getattr(side.batch, name))
    pointers = side.batch.device_block_pointers
    for table, part, arrays in zip(pointers, side.cache.shards, side.arrays):
        table = table if pair.is_exact else arrays.cupy.asarray(table)
        expected = part["base_ptr"] + part["block_bytes"] * np.arange(side.cache.num_blocks)
        np.testing.assert_array_equal(arrays.get(table), expected)


# ---- What is refused


@pytest.mark.parametrize(
    "options, text",
    [
        ({"devices": ["host:0", "host:1"], "shard": None}, "shard does not say"),
        ({"devices": None, "shard": "heads"}, "devices are not given"),
        ({"devices": [], "shard": "heads"}, "devices must be a list"),
        ({"devices": "host:0", "shard": "heads"}, "devices must be a list"),
        ({"devices": ["host:0", 1], "shard": "heads"}, r"devices\[1\] must be a string"),
        ({"devices": ["host:0", "hast:1"], "shard": "heads"}, r'devices\[1\]: device is "hast:1"'),
        ({"devices": ["host:0", "host:64"], "shard": "heads"}, "host:64, not host:0 to host:63"),
        ({"devices": ["host:0", "host:1"], "shard": "tokens"}, "shard must be one of 'heads', 'layers', 'sequences' or None"),
        ({"devices": ["host:0", "host:1"], "shard": "heads", "device": "host"}, "device and devices"),
        ({"devices": [f"host:{i}" for i in range(4)], "shard": "heads"}, "num_kv_heads is 6, which 4 devices"),
        ({"devices": [f"host:{i}" for i in range(9)], "shard": "layers"}, "num_layers is 8, fewer than the 9"),
        ({"devices": ["host:0"] * 65, "shard": "layers"}, "num_devices is 65"),
    ],
)
def test_devices_that_cannot_share_a_cache(options, text):
    layout = pagedkv.Layout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, block_size=BLOCK_SIZE)
    with pytest.raises(pagedkv.InvalidArgumentError, match=text):
        pagedkv.Cache(layout, num_blocks=4, **options)


def test_memory_of_several_devices():
    layout = pagedkv.Layout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype="float32", block_size=BLOCK_SIZE)
    devices = ["host:0", "host:1", "host:2"]
    with pytest.raises(pagedkv.UnsupportedError, match="memory is given"):
        pagedkv.Cache(layout, buffer=bytearray(1 << 20), devices=devices, shard="layers")
    cache = pagedkv.Cache(layout, memory=10 * max(layout.block_bytes // 8 * 3, 1), devices=devices, shard="layers")
    assert cache.num_blocks == 10  # the bytes are of each device: the fullest one decides
    with pytest.raises(BufferError, match="several devices"):
        np.asarray(memoryview(cache))
    for view in (lambda: cache.k_view(0), lambda: cache.v_view(0), lambda: cache.block_view(0)):
        with pytest.raises(pagedkv.UnsupportedError, match="several devices"):
            view()
    one = pagedkv.Cache(layout, num_blocks=4, devices=["host:5"], shard="heads")
    assert one.devices == ("host:5",) and one.shards[0]["num_kv_heads"] == NUM_KV_HEADS
    assert np.asarray(memoryview(one)).shape == (4, layout.block_bytes)
    assert pagedkv.Cache(layout, num_blocks=4, devices=["host:5"]).shard is None


def test_kernels_run_where_the_rows_belong(shard):
    side = Side(["host:0", "host:1"], shard)
    seq = side.cache.open(range(3))
    side.batch.prepare([seq], [3])
    num_kv_heads = side.cache.shards[0]["num_kv_heads"]
    rows = np.zeros((3, num_kv_heads, HEAD_DIM), np.float32)
    q = np.zeros((3, NUM_HEADS * num_kv_heads // NUM_KV_HEADS, HEAD_DIM), np.float32)
    calls = [
        lambda layer, **where: side.cache.write_kv(layer, side.batch, rows, rows, **where),
        lambda layer, **where: side.cache.attend(layer, side.batch, q, **where),
        lambda layer, **where: side.cache.gather_kv(layer, side.batch, 0, 0, 3, **where),
        lambda layer, **where: side.cache.scatter_kv(layer, side.batch, 0, 0, rows, rows, **where),
    ]
    for call in calls:
        call(0, shard=0)
        call(NUM_LAYERS - 1, shard=1)
        for wrong, text in ((2, "shard is 2, but the cache has 2 devices"), (-1, "shard is -1"), ("a", "shard must be")):
            with pytest.raises(pagedkv.InvalidArgumentError, match=text):
                call(0, shard=wrong)
        with pytest.raises(pagedkv.InvalidArgumentError, match="layer is 8, but the layout has 8 layers"):
            call(8, shard=0)
        if shard == "layers":
            call(0)  # the layer tells
            call(NUM_LAYERS - 1)
            with pytest.raises(pagedkv.InvalidArgumentError, match="layer 5 is on device 1, host:1, not on device 0, host:0"):
                call(5, shard=0)
        else:
            call(NUM_LAYERS - 1, shard=0)
            with pytest.raises(pagedkv.InvalidArgumentError, match="shard must be given: which of the devices host:0, host:1"):
                call(0)
    if shard == "heads":
        whole = np.zeros((3, NUM_KV_HEADS, HEAD_DIM), np.float32)
        with pytest.raises(pagedkv.InvalidArgumentError, match=r"k has shape\[1\] = 6"):
            side.cache.write_kv(0, side.batch, whole, whole, shard=1)
        with pytest.raises(pagedkv.InvalidArgumentError, match="q has 8 heads"):
            side.cache.attend(0, side.batch, np.zeros((3, 8, HEAD_DIM), np.float32), shard=1)
        k, _ = side.cache.gather_kv(0, side.batch, 0, 0, 3, shard=1)
        assert k.shape == (3, 3, HEAD_DIM)


def test_one_device_takes_shard_too():
    side = Side("host")
    side.batch.prepare([side.cache.open([])], [2])
    rows = np.zeros((2, NUM_KV_HEADS, HEAD_DIM), np.float32)
    side.cache.write_kv(0, side.batch, rows, rows, shard=0)
    with pytest.raises(pagedkv.InvalidArgumentError, match="shard is 1, but the cache has 1 devices"):
        side.cache.write_kv(0, side.batch, rows, rows, shard=1)
