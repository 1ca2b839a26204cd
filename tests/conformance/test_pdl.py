"""Launches that may begin beside the end of the one before them: the result is the same bit for bit, whatever the launch
before has to leave behind for them."""
import numpy as np
import pytest

import pagedkv

from . import arrays

NUM_LAYERS = 6
LENGTHS = [1, 700, 16, 333, 2048, 5, 90, 1200]


def run_layers(cache, batch, rows, q, outs, pdl, **options):
    """The result of a layer is the query of the next one, and its keys and values are read just behind their writing."""
    for layer in range(NUM_LAYERS):
        cache.write_kv(layer, batch, rows[layer], rows[layer], pdl=pdl, **options)
        cache.attend(layer, batch, q if layer == 0 else outs[layer - 1], out=outs[layer], pdl=pdl, **options)


@pytest.mark.parametrize("is_shared", [False, True], ids=["plain", "shared"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_chains_of_layers(device, head_dim, dtype, is_shared):
    layout = pagedkv.Layout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=400, device=device)
    put, get = arrays.for_device(device).put, arrays.for_device(device).get
    options = dict(shared_prefixes=True, min_shared_tokens=1) if is_shared else {}
    batch = cache.batch(max_sequences=32, max_tokens=6000, **options)
    rng = np.random.default_rng(head_dim)

    def draw(num_tokens, num_heads):
        return put(rng.standard_normal((num_tokens, num_heads, head_dim)).astype(np.float16))

    def attend_all(num_tokens):
        rows, q = [draw(num_tokens, 2) for _ in range(NUM_LAYERS)], draw(num_tokens, 8)
        results = []
        for pdl in (False, True, True):
            for layer in range(NUM_LAYERS):  # others stood there before
                cache.write_kv(layer, batch, q[:, :2], q[:, :2])
            outs = [put(np.full((num_tokens, 8, head_dim), np.nan, np.float16)) for _ in range(NUM_LAYERS)]
            run_layers(cache, batch, rows, q, outs, pdl)
            results.append([get(out) for out in outs])
        for other in results[1:]:
            for layer in range(NUM_LAYERS):
                np.testing.assert_array_equal(other[layer], results[0][layer])

    sequences = [cache.open([]) for _ in LENGTHS]
    batch.prepare(sequences, LENGTHS)
    attend_all(sum(LENGTHS))
    sequences = [fork for sequence in sequences for fork in (sequence, sequence.fork())]
    for _ in range(3):
        batch.prepare(sequences, [1] * len(sequences))
        assert not is_shared or batch.num_shared_prefixes > 4
        attend_all(len(sequences))


def test_one_graph(device):
    if device == "host":
        pytest.skip("graphs are of a device")
    torch = pytest.importorskip("torch", reason="the graph is captured with PyTorch")
    layout = pagedkv.Layout(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=400, device=device)
    batch = cache.batch(max_sequences=8, max_tokens=6000, max_sequence_length=2100)
    stream = torch.cuda.Stream()
    sequences = [cache.open([]) for _ in LENGTHS]
    batch.prepare(sequences, LENGTHS, stream=stream)
    with torch.cuda.stream(stream):
        long_rows = torch.randn(sum(LENGTHS), 2, 128, dtype=torch.bfloat16, device="cuda")
        for layer in range(NUM_LAYERS):
            cache.write_kv(layer, batch, long_rows, long_rows, stream=stream)
        rows = torch.randn(NUM_LAYERS, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
        q = torch.randn(8, 8, 128, dtype=torch.bfloat16, device="cuda")
        outs = torch.zeros(2, NUM_LAYERS, 8, 8, 128, dtype=torch.bfloat16, device="cuda")
    batch.prepare(sequences, [1] * 8, stream=stream)
    graphs = []
    for pdl in (False, True):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            run_layers(cache, batch, rows, q, outs[int(pdl)], pdl, stream=stream)
    for _ in range(10):
        batch.prepare(sequences, [1] * 8, stream=stream)
        with torch.cuda.stream(stream):
            rows.normal_(), q.normal_(), outs.fill_(float("nan"))
            for graph in graphs:
                graph.replay()
        stream.synchronize()
        assert torch.equal(outs[0], outs[1]) and not outs.isnan().any()
