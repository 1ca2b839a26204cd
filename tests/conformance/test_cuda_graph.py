"""One captured CUDA graph of write and attend over 32 layers serves a thousand steps in which sequences grow, fork, are
truncated and closed; one of chunks meets decode tokens. Every step is also made by the host backend, and the results are
compared."""
import numpy as np
import pytest

import pagedkv

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 32, 2, 8, 64
MOST_SEQUENCES, MOST_LENGTH, NUM_STEPS = 8, 300, 1000


def make(device, max_tokens=MOST_SEQUENCES):
    layout = pagedkv.Layout(num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float16",
                            block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=150, device=device, hash_seed=1)
    batch = cache.batch(max_sequences=MOST_SEQUENCES, max_tokens=max_tokens, max_sequence_length=MOST_LENGTH,
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


def test_a_graph_of_chunks_meets_decode_tokens():
    """The counts of the step that is captured may choose a kernel; it serves other steps as well."""
    info = pagedkv.cuda_info()
    if not info["is_usable"]:
        pytest.skip(f"no CUDA: {info['reason']}")
    torch = pytest.importorskip("torch", reason="the graph is captured with PyTorch")
    (host, host_batch), (device, device_batch) = (make(name, max_tokens=400) for name in ("host", "cuda"))
    stream = torch.cuda.Stream()
    twins = [Twin(host.open([]), device.open([])) for _ in range(4)]
    q, out = (torch.zeros(400, NUM_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda") for _ in "qo")
    rng = np.random.default_rng(6)
    graph = None
    for counts in ([100, 70, 90, 80], [1, 200, 1, 9], [1, 1, 0, 1], [50, 1, 2, 3]):
        made = []
        for cache, batch, which in ((host, host_batch, 0), (device, device_batch, 1)):
            batch.prepare([twin.sequences[which] for twin in twins], counts, pad_sequences=MOST_SEQUENCES, pad_tokens=400,
                          max_query_len=200, **({} if cache is host else {"stream": stream}))
        for shape in ((400, NUM_KV_HEADS, HEAD_DIM),) * 2 + ((400, NUM_HEADS, HEAD_DIM),):
            made.append(rng.standard_normal(shape).astype(np.float16))
        host.write_kv(0, host_batch, made[0], made[1])
        with torch.cuda.stream(stream):
            device.write_kv(0, device_batch, *(torch.from_numpy(array).cuda() for array in made[:2]), stream=stream)
            q.copy_(torch.from_numpy(made[2]))
            if graph is None:
                device.attend(0, device_batch, q, out=out, stream=stream)  # once outside the capture
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    device.attend(0, device_batch, q, out=out, stream=stream)
            out.fill_(float("nan"))
            graph.replay()
        stream.synchronize()
        expected = host.attend(0, host_batch, made[2]).astype(np.float64)
        assert np.abs(out.cpu().numpy().astype(np.float64) - expected).max() < 4e-3, counts
