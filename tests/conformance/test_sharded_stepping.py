"""Steps ahead over several devices: one call advances all of them, and they give what one device gives."""
import numpy as np
import pytest

import pagedkv

from .several_devices import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Pair, SharedOutPair, Side, devices, shard  # noqa: F401

NUM_STEPS, MOST_LENGTH = 9, 40


def make_batches(pair):
    for side in pair.sides:
        side.batch = side.cache.batch(8, 64, max_sequence_length=MOST_LENGTH, num_heads=NUM_HEADS, formats=("table", "csr"))


def run_layers(pair, rng):
    """write_kv and attend of one step; every row is compared."""
    num_tokens = pair.sides[1].batch.num_tokens
    for layer in range(pair.num_layers):
        k, v = rng.standard_normal((2, num_tokens, NUM_KV_HEADS, HEAD_DIM), np.float32)
        q = rng.standard_normal((num_tokens, NUM_HEADS, HEAD_DIM), np.float32)
        for side in pair.sides:
            side.write(layer, k, v)
        pair.compare(*(side.attend(layer, q) for side in pair.sides))


def put_active(side, is_active):
    arrays = [own.put(is_active) for own in side.arrays]
    return arrays if len(arrays) > 1 else arrays[0]


@pytest.mark.parametrize("pads", [False, True])
def test_steps_are_those_of_one_device(devices, shard, pads):
    pair = Pair(devices, shard, layout={"num_layers": 3})
    make_batches(pair)
    rng = np.random.default_rng(11)
    prompts = [list(range(5)), list(range(50, 59)), list(range(5))]
    for tokens in prompts:
        pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
    counts = [len(prompt) - seq.length for prompt, seq in zip(prompts, pair.sides[0].sequences)]
    assert pair.step([0, 1, 2], counts, sum(prompts, []))
    padding = {"pad_sequences": 5, "pad_tokens": 5} if pads else {}
    pair.each(lambda side: side.batch.prepare(side.sequences, [1] * 3, tokens=[90, 91, 92], steps_ahead=NUM_STEPS, **padding))
    run_layers(pair, rng)
    expected = np.zeros(3, int)
    for step in range(NUM_STEPS):
        is_active = np.ones(5 if pads else 3, bool)
        is_active[:3] = rng.random(3) < 0.8
        expected += is_active[:3]
        kind = np.int32 if step % 2 else bool
        whole = step == 4  # None: all of them
        if whole:
            expected += ~is_active[:3]
        pair.each(lambda side: side.batch.advance(None if whole else put_active(side, is_active.astype(kind))))
        first, second = ([np.array(side.arrays[index].get_table(table)) for table in tables]
                         for side, index, tables in list_tables(pair))
        for one, other in zip(first, second):
            np.testing.assert_array_equal(one, other)
        run_layers(pair, rng)
    results = pair.each(lambda side: side.batch.get_advanced())
    for counts, num_refused in results:
        assert counts.tolist() == expected.tolist() and num_refused == 0
    tokens = rng.integers(0, 9, expected.sum()).tolist()
    pair.each(lambda side: side.batch.settle(expected, tokens=tokens))
    assert [seq.length for seq in pair.sides[0].sequences] == [len(p) + 1 + n for p, n in zip(prompts, expected)]
    pair.compare_stored()
    pair.check()


def list_tables(pair):
    """(side, device, its tables as they stand there) of the last device of several and of the single one."""
    names = ("block_table", "seq_lens", "slot_mapping", "positions", "indptr", "last_block_len")
    several, single = pair.sides
    yield several, -1, [getattr(several.batch, "device_" + name)[-1] for name in names]
    yield single, 0, [getattr(single.batch, "device_" + name) for name in names]


def test_streams_of_each_device(devices):
    side = Side(devices[0], "heads")
    side.batch = side.cache.batch(4, 8, max_sequence_length=16)
    streams = [0] * len(devices[0])
    seq = side.cache.open(range(3))
    side.batch.prepare([seq], [3], tokens=range(3), stream=streams)
    side.batch.prepare([seq], [1], tokens=[3], steps_ahead=3, stream=streams)
    side.batch.advance(stream=streams)
    counts, num_refused = side.batch.get_advanced(stream=streams)
    assert counts.tolist() == [1] and num_refused == 0
    for call in (side.batch.advance, side.batch.get_advanced):
        with pytest.raises(pagedkv.InvalidArgumentError, match="stream must be 0 or a list of"):
            call(stream=[0])


def test_graphs_of_each_device(shard):
    """advance, write and attend captured once, in a graph of each device, and replayed for all steps."""
    if not pagedkv.cuda_info()["is_usable"]:
        pytest.skip(f"no CUDA: {pagedkv.cuda_info()['reason']}")
    pair = Pair((["cuda:0", "cuda:0"], "cuda:0"), shard, layout={"num_layers": 3})
    make_batches(pair)
    several, single = pair.sides
    prompts = [list(range(5)), list(range(50, 59)), [7]]
    for tokens in prompts:
        pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
    assert pair.step([0, 1, 2], [len(prompt) for prompt in prompts], sum(prompts, []))
    cupy = several.arrays[0].cupy
    cupy.cuda.Device(0).synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in several.arrays]
    handles = [stream.ptr for stream in streams]
    several.batch.prepare(several.sequences, [1] * 3, steps_ahead=NUM_STEPS, stream=handles)
    single.batch.prepare(single.sequences, [1] * 3, steps_ahead=NUM_STEPS)
    k, v = pair.rng.standard_normal((2, 3, NUM_KV_HEADS, HEAD_DIM), np.float32)
    q = pair.rng.standard_normal((3, NUM_HEADS, HEAD_DIM), np.float32)
    group = NUM_HEADS // NUM_KV_HEADS
    work = []  # (layer, device, its k, v, q, out)
    for layer in range(pair.num_layers):
        for index, heads in several.holders(layer):
            own_q = cupy.asarray(q[:, heads.start * group : heads.stop * group])
            work.append((layer, index, cupy.asarray(k[:, heads] + layer), cupy.asarray(v[:, heads] - layer), own_q,
                         cupy.empty_like(own_q)))
    masks = [cupy.ones(3, cupy.int32) for _ in streams]
    cupy.cuda.Device(0).synchronize()

    def run_layers():
        for layer, index, own_k, own_v, own_q, out in work:
            several.cache.write_kv(layer, several.batch, own_k, own_v, shard=index, stream=handles[index])
            several.cache.attend(layer, several.batch, own_q, out=out, shard=index, stream=handles[index])

    run_layers()
    for layer in range(pair.num_layers):
        single.write(layer, k + layer, v - layer)
    for stream in streams:
        stream.synchronize()
        stream.begin_capture()
    several.batch.advance(masks, stream=handles)
    run_layers()
    graphs = [stream.end_capture() for stream in streams]
    expected = np.zeros(3, int)
    for _ in range(NUM_STEPS):
        is_active = (pair.rng.random(3) < 0.7).astype(np.int32)
        expected += is_active
        single.batch.advance(cupy.asarray(is_active))
        for stream, mask, graph in zip(streams, masks, graphs):
            mask.set(is_active, stream=stream)
            graph.launch(stream)
        for stream in streams:
            stream.synchronize()
        for layer in range(pair.num_layers):
            single.write(layer, k + layer, v - layer)
            out, _ = single.attend(layer, q)
            parts = [cupy.asnumpy(part[-1]) for part in work if part[0] == layer]
            np.testing.assert_allclose(np.concatenate(parts, 1), out, atol=2e-3, rtol=2e-3)
    counts, num_refused = several.batch.get_advanced(stream=handles)
    assert counts.tolist() == expected.tolist() and num_refused == 0
    pair.each(lambda side: side.batch.settle(expected))
    pair.each(lambda side: [seq.append([1], stream=None) for seq in side.sequences])
    pair.check()


def test_what_advance_refuses(shard):
    side = Side(["host:0", "host:1"], shard)
    side.batch = side.cache.batch(4, 8, max_sequence_length=16)
    sequences = side.cache.open_many([[], []])
    side.batch.prepare(sequences, [1, 1], steps_ahead=2)
    ones, zeros = np.ones(2, bool), np.zeros(2, np.int32)
    for value in (ones, [ones], [ones] * 3):
        with pytest.raises(pagedkv.InvalidArgumentError, match="is_active must be None or a list of 2 arrays"):
            side.batch.advance(value)
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"is_active\[1\] has shape\[0\] = 3"):
        side.batch.advance([ones, np.ones(3, bool)])
    with pytest.raises(pagedkv.InvalidArgumentError, match=r"is_active\[1\] and is_active\[0\] differ at 0"):
        side.batch.advance([ones, zeros])
    assert side.batch.get_advanced()[0].tolist() == [0, 0]
    side.batch.advance([ones, np.ones(2, np.int32)])
    assert side.batch.get_advanced()[0].tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(2))
def test_parts_go_their_own_steps(devices, seed):
    """With shard="sequences": prepared and settled as a whole, advanced by each device."""
    pair = SharedOutPair(devices, seed, layout={"num_layers": 2})
    make_batches(pair)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 99, rng.integers(1, 12)).tolist() for _ in range(5)]
    for side in pair.sides:
        side.sequences = side.cache.open_many(prompts)
    assert pair.step(range(5), [len(prompt) for prompt in prompts], sum(prompts, []))
    pair.each(lambda side: side.batch.prepare(side.sequences, [1] * 5, tokens=range(5), steps_ahead=NUM_STEPS))
    run_layers(pair, rng)
    whole, single = pair.sides
    with pytest.raises(pagedkv.UnsupportedError, match="advance the parts"):
        whole.batch.advance()
    expected = np.zeros(5, int)
    for _ in range(NUM_STEPS):
        is_active = rng.random(5) < 0.7
        expected += is_active
        single.batch.advance(put_active(single, is_active))
        for part, arrays in zip(whole.batch.parts, whole.arrays):
            part.advance(arrays.put(is_active[part.sequence_places]))
        run_layers(pair, rng)
    for part in whole.batch.parts:
        assert part.get_advanced()[0].tolist() == expected[part.sequence_places].tolist()
    assert whole.batch.get_advanced()[0].tolist() == single.batch.get_advanced()[0].tolist() == expected.tolist()
    tokens = rng.integers(0, 9, expected.sum()).tolist()
    for counts, text in ((expected[:4], "num_sequences is 4, but the step has 5"), (expected * 0 + 10, "is 10, not in 0 to")):
        with pytest.raises(pagedkv.InvalidArgumentError, match=text):
            whole.batch.settle(counts)
    with pytest.raises(pagedkv.InvalidArgumentError, match="counts add up to"):
        whole.batch.settle(expected, tokens=[1])
    lengths = [seq.length for seq in whole.sequences]
    whole.sequences[-1].truncate(lengths[-1] - 1)
    with pytest.raises(pagedkv.InvalidArgumentError, match="has changed since"):
        whole.batch.settle(expected + 1 - (expected > 0), tokens=None)
    assert [seq.length for seq in whole.sequences[:-1]] == lengths[:-1]  # of all or none
    single.sequences[-1].truncate(lengths[-1] - 1)
    keeps = expected.copy()
    keeps[-1] = 0
    for side in pair.sides:
        side.batch.settle(keeps, tokens=tokens[: keeps.sum()])
    assert [seq.length for seq in whole.sequences] == [seq.length for seq in single.sequences]
    pair.compare_stored()
    pair.check()
    prompt = prompts[0] + [0] + tokens[: keeps[0]]
    assert whole.cache.probe(prompt) == single.cache.probe(prompt) == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_part_settles_its_own_steps():
    cache = pagedkv.Cache(pagedkv.Layout(1, 2, 8, dtype="float32", block_size=4), num_blocks=8,
                          devices=["host:0", "host:1"], shard="sequences")
    batch = cache.batch(4, 8, max_sequence_length=16)
    first, second = cache.open_many([[], []])
    batch.prepare([second, first], [1, 1], steps_ahead=3)
    for part in batch.parts:
        part.advance()
    batch.parts[0].settle([1], tokens=[5])
    assert (first.length, second.length) == (2, 1)
    with pytest.raises(pagedkv.InvalidArgumentError, match="no steps ahead to settle"):
        batch.settle([1, 0])
    batch.parts[1].settle([1])
    assert (first.length, second.length) == (2, 2)
    cache.check()
