"""Steps ahead in one captured CUDA graph: advance, then write and attend over several layers, replayed 64 times without the
host, for one set of sequences after another. The host backend makes the same steps one by one."""
import numpy as np
import pytest

import pagedkv

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 4, 2, 8, 64
MOST_SEQUENCES, MOST_LENGTH, NUM_STEPS, NUM_ROUNDS = 8, 400, 64, 5
WIDTH = NUM_HEADS + 2 * NUM_KV_HEADS


def make(device):
    layout = pagedkv.Layout(num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float16",
                            block_size=16)
    cache = pagedkv.Cache(layout, num_blocks=260, device=device, hash_seed=1)
    batch = cache.batch(max_sequences=MOST_SEQUENCES, max_tokens=MOST_SEQUENCES, max_sequence_length=MOST_LENGTH,
                        num_heads=NUM_HEADS, formats=("table", "csr"))
    return cache, batch


def split(rows):
    """Queries, K and V of [..., WIDTH, HEAD_DIM]."""
    return [np.ascontiguousarray(part) for part in np.split(rows, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=-2)]


class ByHost:
    """The host backend, a step at a time; rows: float16 [layer, sequence, WIDTH, HEAD_DIM]."""

    def __init__(self):
        self.cache, self.batch = make("host")
        self.sequences = []

    def step(self, is_active, rows, tokens):
        chosen = np.flatnonzero(is_active)
        self.batch.prepare([self.sequences[i] for i in chosen], [1] * len(chosen), tokens=tokens[chosen])
        out = np.zeros((NUM_LAYERS, len(is_active), NUM_HEADS, HEAD_DIM), np.float16)
        for layer in range(NUM_LAYERS):
            q, k, v = split(rows[layer, chosen])
            self.cache.write_kv(layer, self.batch, k, v)
            out[layer, chosen] = self.cache.attend(layer, self.batch, q)
        return out


class ByGraph:
    """A CUDA device. What a step reads and writes is chosen by a counter on the device, so a replay needs no host."""

    def __init__(self, torch):
        self.torch = torch
        self.cache, self.batch = make("cuda")
        self.sequences = []
        self.stream = torch.cuda.Stream()
        self.graph = None
        options = dict(dtype=torch.float16, device="cuda")
        self.counter = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.plan = torch.zeros(NUM_STEPS + 1, MOST_SEQUENCES, dtype=torch.int32, device="cuda")
        self.is_active = torch.zeros(MOST_SEQUENCES, dtype=torch.int32, device="cuda")
        parts = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS, "out": NUM_HEADS}
        self.all = {name: torch.zeros(NUM_STEPS + 1, NUM_LAYERS, MOST_SEQUENCES, heads, HEAD_DIM, **options)
                    for name, heads in parts.items()}
        self.now = {name: torch.zeros(NUM_LAYERS, MOST_SEQUENCES, heads, HEAD_DIM, **options)
                    for name, heads in parts.items()}

    def run_layers(self):
        for name in "qkv":
            self.now[name].copy_(self.all[name].index_select(0, self.counter)[0])
        for layer in range(NUM_LAYERS):
            self.cache.write_kv(layer, self.batch, self.now["k"][layer], self.now["v"][layer], stream=self.stream)
            self.cache.attend(layer, self.batch, self.now["q"][layer], out=self.now["out"][layer], stream=self.stream)
        self.all["out"].index_copy_(0, self.counter, self.now["out"][None])
        self.counter += 1

    def run_ahead(self):
        self.is_active.copy_(self.plan.index_select(0, self.counter)[0])
        self.batch.advance(self.is_active, stream=self.stream)
        self.run_layers()

    def load(self, plan, rows):
        """plan: int32 [NUM_STEPS + 1, sequences]; rows: float16 [NUM_STEPS + 1, layer, sequence, WIDTH, HEAD_DIM]."""
        torch, count = self.torch, plan.shape[1]
        self.plan.zero_()
        self.plan[:, :count] = torch.from_numpy(plan).cuda()
        for name, part in zip("qkv", split(rows)):
            self.all[name].zero_()
            self.all[name][:, :, :count] = torch.from_numpy(part).cuda()
        self.all["out"].fill_(float("nan"))
        self.counter.zero_()
        torch.cuda.synchronize()

    def steps(self, tokens):
        torch, count = self.torch, len(self.sequences)
        self.batch.prepare(self.sequences, [1] * count, tokens=tokens, stream=self.stream, pad_sequences=MOST_SEQUENCES,
                           pad_tokens=MOST_SEQUENCES, max_query_len=1, steps_ahead=NUM_STEPS)
        with torch.cuda.stream(self.stream):
            self.run_layers()
            if self.graph is None:
                self.stream.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.run_ahead()
            for _ in range(NUM_STEPS):
                self.graph.replay()
        counts, num_refused = self.batch.get_advanced(stream=self.stream)
        assert num_refused == 0
        return counts, self.all["out"].cpu().numpy()[:, :, :count]


def test_steps_of_one_graph():
    info = pagedkv.cuda_info()
    if not info["is_usable"]:
        pytest.skip(f"no CUDA: {info['reason']}")
    torch = pytest.importorskip("torch", reason="the graph is captured with PyTorch")
    host, device = ByHost(), ByGraph(torch)
    rng = np.random.default_rng(11)
    generation = device.batch.generation
    worst = 0.0
    for round_ in range(NUM_ROUNDS):
        for side in (host, device):  # the first ones, then forks of the first, and some closed
            if round_ == 0:
                side.sequences = [side.cache.open([]) for _ in range(3)]
            elif round_ < 4:
                side.sequences += [side.sequences[0].fork(), side.cache.open([])][: 1 + round_ % 2]
            else:
                for sequence in side.sequences[1::2]:
                    sequence.close()
                side.sequences = side.sequences[::2]
        count = len(host.sequences)
        plan = np.zeros((NUM_STEPS + 1, count), np.int32)
        plan[0] = 1
        plan[1:] = np.arange(NUM_STEPS)[:, None] < rng.integers(1, NUM_STEPS + 1, count)
        plan[1:, 0] = rng.random(NUM_STEPS) < 0.8  # pauses
        rows = rng.standard_normal((NUM_STEPS + 1, NUM_LAYERS, count, WIDTH, HEAD_DIM)).astype(np.float16)
        tokens = rng.integers(0, 3, (NUM_STEPS + 1, count))
        device.load(plan, rows)
        counts, actual = device.steps(tokens[0])
        assert counts.tolist() == plan[1:].sum(axis=0).tolist()
        device.batch.settle(counts, tokens=np.concatenate([tokens[1:, i][plan[1:, i] > 0] for i in range(count)]))
        for step in range(NUM_STEPS + 1):
            if not plan[step].any():
                continue
            expected = host.step(plan[step], rows[step], tokens[step])
            chosen = plan[step] > 0
            error = np.abs(actual[step][:, chosen].astype(np.float64) - expected[:, chosen])
            assert error.max() < 4e-3, (round_, step)
            worst = max(worst, float(error.max()))
        assert [s.length for s in device.sequences] == [s.length for s in host.sequences]
        assert device.cache.stats()["registered"] == host.cache.stats()["registered"]
        device.cache.check()
    assert device.batch.generation == generation
    assert device.cache.stats()["copies"] == host.cache.stats()["copies"] > 0
    print(f"largest difference {worst:.2g}")
