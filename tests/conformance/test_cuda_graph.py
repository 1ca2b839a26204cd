"""One captured CUDA graph of write and attend over 32 layers serves a thousand steps in which sequences grow, fork, are
truncated and closed. Every step is also made by the host backend, and the results are compared."""
import numpy as np
import pytest

import pagedkv

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 32, 2, 8, 64
MOST_SEQUENCES, MOST_LENGTH, NUM_STEPS = 8, 300, 1000


def make(device):
    layout = pagedkv.Layout(num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float16",
                            block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=150, device=device, hash_seed=1)
    batch = cache.batch(max_sequences=MOST_SEQUENCES, max_tokens=MOST_SEQUENCES, max_sequence_length=MOST_LENGTH,
                        num_heads=NUM_HEADS)
    return cache, batch


class Twin:
    """The same calls on both caches; they hand out the same blocks."""

    def __init__(self, *sequences):
        self.sequences = sequences

    def __getattr__(self, name):
        def call(*arguments):
            return [getattr(sequence, name)(*arguments) for sequence in self.sequences]
        return call

    @property
    def length(self):
        return self.sequences[0].length


def test_thousand_steps_of_one_graph():
    info = pagedkv.cuda_info()
    if not info["is_usable"]:
        pytest.skip(f"no CUDA: {info['reason']}")
    torch = pytest.importorskip("torch", reason="the graph is captured with PyTorch")
    host, host_batch = make("host")
    device, device_batch = make("cuda")
    padding = dict(pad_sequences=MOST_SEQUENCES, pad_tokens=MOST_SEQUENCES, max_query_len=1)
    stream = torch.cuda.Stream()
    options = dict(dtype=torch.float16, device="cuda")
    k, v = (torch.zeros(NUM_LAYERS, MOST_SEQUENCES, NUM_KV_HEADS, HEAD_DIM, **options) for _ in "kv")
    q, out = (torch.zeros(NUM_LAYERS, MOST_SEQUENCES, NUM_HEADS, HEAD_DIM, **options) for _ in "qo")

    def run_layers():
        for layer in range(NUM_LAYERS):
            device.write_kv(layer, device_batch, k[layer], v[layer], stream=stream)
            device.attend(layer, device_batch, q[layer], out=out[layer], stream=stream)

    rng = np.random.default_rng(5)
    live = [Twin(host.open([]), device.open([]))]
    generation = device_batch.generation
    graph = None
    worst = 0.0
    for step in range(NUM_STEPS):
        action = rng.random()
        if action < 0.08 and len(live) < MOST_SEQUENCES:
            live.append(Twin(*live[rng.integers(len(live))].fork()))
        elif action < 0.12 and len(live) < MOST_SEQUENCES:
            live.append(Twin(host.open([]), device.open([])))
        elif action < 0.17 and len(live) > 1:
            live.pop(rng.integers(len(live))).close()
        elif action < 0.25:
            twin = live[rng.integers(len(live))]
            twin.truncate(int(rng.integers(max(twin.length - 40, 0), twin.length + 1)))
        for twin in [twin for twin in live if twin.length == MOST_LENGTH]:
            twin.truncate(MOST_LENGTH // 3)
        counts = [int(rng.random() < 0.9) for _ in live]
        tokens = rng.integers(0, 1000, sum(counts))
        host_batch.prepare([twin.sequences[0] for twin in live], counts, tokens=tokens, **padding)
        device_batch.prepare([twin.sequences[1] for twin in live], counts, tokens=tokens, stream=stream, **padding)
        assert (host_batch.block_table == device_batch.block_table).all()
        new = rng.standard_normal((NUM_LAYERS, MOST_SEQUENCES, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM))
        new = new.astype(np.float16)
        parts = [np.ascontiguousarray(part) for part in np.split(new, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=2)]
        with torch.cuda.stream(stream):
            for target, part in zip((q, k, v), parts):
                target.copy_(torch.from_numpy(part))
            if graph is None:
                run_layers()  # once outside the capture
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    run_layers()
            out.fill_(float("nan"))
            graph.replay()
        stream.synchronize()
        checked = set(rng.integers(0, NUM_LAYERS, 2).tolist()) if step % 5 == 0 else set()
        for layer in range(NUM_LAYERS):
            host.write_kv(layer, host_batch, parts[1][layer], parts[2][layer])
            if layer in checked:
                expected = host.attend(layer, host_batch, parts[0][layer]).astype(np.float64)
                actual = out[layer].cpu().numpy().astype(np.float64)
                worst = max(worst, float(np.abs(actual - expected).max()))
                assert worst < 4e-3, (step, layer)
    assert device_batch.generation == generation  # no address has changed
    assert host.stats()["copies"] == device.stats()["copies"] > 20
    device.check()
