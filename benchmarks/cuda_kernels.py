"""Times the CUDA kernels, beside FlashInfer where it can be imported, on the same inputs in the same run; decode of
bfloat16 and sequences of one length also beside cuDNN, which PyTorch calls on contiguous copies, without pages.

    python benchmarks/cuda_kernels.py [--quick] [--commit HASH] [--output FILE]

Needs PyTorch and a GPU. Each case has several layers of K and V, together larger than the L2 cache, in blocks in random
order; the calls over all layers are captured in one CUDA graph, and the figure is the median of its replays divided by
the number of layers. Decode counts the K and V bytes that are read, as a share of the read ceiling measured first (a
plain kernel that reads eight gigabytes with 16-byte loads); prefill two operations for each multiply-add under the causal
mask; write_kv the bytes read and written. Outputs are compared: more than 2 % of their size apart is an error.
Head dimension 128, blocks of 16 tokens, bfloat16 queries.
"""

import datetime
import json
import random
import statistics
import sys

import numpy as np
import torch
from replay_traces import ROOT, find_commit, make_parser
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pagedkv

HEAD_DIM, BLOCK_SIZE = 128, 16
LAYER_BYTES = 200 << 20  # of all layers of a case together, at least
NUM_REPLAYS = 30
READ_BYTES = 8 << 30
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
DECODE_DTYPES = ["bfloat16", "float8_e4m3"]
RAGGED = [16 * 2 ** (i % 12) for i in range(64)]  # 16 to 32768
DECODE = {"1 x 8192": [8192], "1 x 131072": [131072], "8 x 8192": [8192] * 8, "64 x 2048": [2048] * 64,
          "64 x 8192": [8192] * 64, "256 x 1024": [1024] * 256, "64 ragged": RAGGED}
HEADS = [(32, 8), (28, 4), (32, 32), (64, 8)]
PREFILL = {"8 x 2048": ([2048] * 8, [2048] * 8), "1 x 8192": ([8192], [8192]),
           "4 x 512 of 8192": ([8192] * 4, [512] * 4), "1 x 2048 of 32768": ([32768], [2048])}
WRITE = {"256 tokens": [1] * 256, "8192 tokens": [2048] * 4, "65536 tokens": [8192] * 8}

READ_KERNEL = r"""
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4 *data, long long count, unsigned *out) {
  unsigned sum = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 part[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(part[j].x), "=r"(part[j].y), "=r"(part[j].z), "=r"(part[j].w) : "l"(data + i + j * stride));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += part[j].x ^ part[j].y ^ part[j].z ^ part[j].w;
  }
  for (; i < count; i += stride) sum += data[i].x;
  if (sum == 0x12345678) *out = sum;
}
"""


def main():
    parser = make_parser(__doc__, "cuda-kernels")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    report = {"date": date, "version": pagedkv.version(), "commit": arguments.commit or find_commit(),
              "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
              "replays": NUM_REPLAYS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE,
              "read_gb_per_s": measure_reading(), "peer": None, "dense": None, "decode": [], "prefill": [], "write_kv": []}
    peer = find_peer()
    if peer:
        report["peer"] = f"flashinfer {peer.version}"
    dense = Dense() if torch.backends.cudnn.is_available() else None
    if dense:
        report["dense"] = f"cuDNN {torch.backends.cudnn.version()}"
    for shape, lengths in list(DECODE.items())[:3 if arguments.quick else None]:
        for heads in HEADS[:1 if arguments.quick else None]:
            for dtype in DECODE_DTYPES:
                record(report, "decode", shape, heads, dtype, lengths, [1] * len(lengths), peer, dense)
    for shape, (lengths, counts) in list(PREFILL.items())[:1 if arguments.quick else None]:
        record(report, "prefill", shape, (32, 8), "bfloat16", lengths, counts, peer)
    for shape, counts in WRITE.items():
        record(report, "write_kv", shape, (32, 8), "bfloat16", counts, counts, peer)
    output = arguments.output or ROOT / "benchmarks" / "results" / f"cuda-kernels-{date}.json"
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(output)


def record(report, kind, shape, heads, dtype, lengths, counts, peer, dense=None):
    for system in filter(None, (peer, dense)):
        system.drop()
    torch.cuda.empty_cache()
    case = Case(heads, dtype, lengths, counts)
    row = {"shape": shape, "heads": f"{heads[0]}/{heads[1]}", "dtype": dtype, "layers": case.num_layers}
    expected = None
    for name, system in (("pagedkv", case), ("peer", peer and peer.adopt(case)), ("dense", dense and dense.adopt(case))):
        if system is None:
            continue
        try:
            calls = getattr(system, kind)()
        except Unsupported:
            continue
        row[name] = {"us": time_graph(calls), **getattr(system, "notes", {})}
        if kind != "write_kv":
            out = system.result()
            if expected is not None:
                error = float((out - expected).abs().max() / expected.abs().max())
                if not error < 0.02 * (4 if dtype != "bfloat16" else 1):
                    raise SystemExit(f"{kind} {shape} {heads} {dtype}: results are {error:.3g} apart")
                row["difference"] = max(error, row.get("difference", 0.0))
            else:
                expected = out
        for timed in [row[name]]:
            timed.update(rate(kind, case, timed["us"], report["read_gb_per_s"]))
    report[kind].append(row)
    print(row, file=sys.stderr)
    case.close()


def rate(kind, case, us, read_ceiling):
    if kind == "prefill":
        flops = sum(4 * case.num_heads * HEAD_DIM * sum(range(n - new + 1, n + 1))
                    for n, new in zip(case.lengths, case.counts))
        return {"tflop_per_s": flops / us / 1e6}
    row_bytes = case.num_kv_heads * HEAD_DIM * 2
    if kind == "write_kv":
        return {"gb_per_s": sum(case.counts) * row_bytes * (2 + case.element_bytes) / us / 1e3}
    speed = sum(case.lengths) * row_bytes * case.element_bytes / us / 1e3
    return {"gb_per_s": speed, "share_of_read_ceiling": speed / read_ceiling}


class Unsupported(Exception):
    pass


class Case:
    """A cache whose layers are the input sets, filled with random K and V, and the batch of one step."""

    def __init__(self, heads, dtype, lengths, counts, **layout):
        self.num_heads, self.num_kv_heads = heads
        self.dtype, self.lengths, self.counts = dtype, lengths, counts
        self.element_bytes = 2 if dtype == "bfloat16" else 1
        layer_bytes = sum(lengths) * self.num_kv_heads * HEAD_DIM * 2 * self.element_bytes
        self.num_layers = max(2, min(32, -(-LAYER_BYTES // layer_bytes)))
        layout = pagedkv.Layout(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=HEAD_DIM,
                                dtype=dtype, block_size=BLOCK_SIZE, **layout)
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device="cuda", prefix_caching=False)
        self.shuffle(num_blocks)
        self.layout = layout
        self.fill()
        self.sequences = [self.cache.open([]) for _ in lengths]
        self.batch = self.cache.batch(max_sequences=len(lengths), max_tokens=max(sum(lengths), 1))
        self.batch.prepare(self.sequences, [n - new for n, new in zip(lengths, counts)])
        self.batch.prepare(self.sequences, counts)
        tokens = sum(counts)
        self.q = torch.randn(tokens, self.num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(tokens, self.num_kv_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                          for _ in "kv")
        self.out = torch.full_like(self.q, float("nan"))

    def shuffle(self, num_blocks):
        """Blocks of one token each, released in random order, so that they are handed out again at random."""
        sequences = [self.cache.open([]) for _ in range(num_blocks)]
        for sequence in sequences:
            sequence.reserve(1)
        random.Random(0).shuffle(sequences)
        for sequence in sequences:
            sequence.close()

    def memory(self):
        return torch.as_tensor(self.cache, device="cuda")  # uint8 [num_blocks, block_bytes], no copy

    def fill(self):
        memory = self.memory()
        for first in range(0, len(memory), 256):  # in pieces: random numbers are float32 at first
            piece = memory[first:first + 256]
            values = torch.randn(piece.numel() // self.element_bytes, device="cuda")
            piece.copy_(values.to(DTYPES[self.dtype]).view(torch.uint8).view(piece.shape))

    def decode(self):
        self.layer = self.num_layers - 1
        return [lambda layer=layer: self.cache.attend(layer, self.batch, self.q, out=self.out, stream=stream())
                for layer in range(self.num_layers)]

    prefill = decode

    def write_kv(self):
        return [lambda layer=layer: self.cache.write_kv(layer, self.batch, self.k, self.v, stream=stream())
                for layer in range(self.num_layers)]

    def result(self):
        return self.out.float()

    def pages(self, layer):
        """K and V of a layer as [num_blocks, block_size, num_kv_heads, head_dim], strided views of the cache."""
        whole = self.memory().view(DTYPES[self.dtype])
        size = BLOCK_SIZE * self.num_kv_heads * HEAD_DIM
        shape = (len(whole), BLOCK_SIZE, self.num_kv_heads, HEAD_DIM)
        offset = self.layout.layer(layer)["k_offset"] // self.element_bytes
        return tuple(whole[:, offset + i * size:offset + (i + 1) * size].reshape(shape).contiguous() for i in range(2))

    def close(self):
        for sequence in self.sequences:
            sequence.close()
        self.batch.close()


def stream():
    return torch.cuda.current_stream().cuda_stream


def find_peer():
    try:
        import flashinfer
    except ImportError as error:
        print(f"without a peer: {error}", file=sys.stderr)
        return None
    return Peer(flashinfer)


class Peer:
    """FlashInfer: tensor-core decode, its FA3 prefill, its append. It reads copies of the same rows."""

    def __init__(self, flashinfer):
        self.flashinfer, self.version = flashinfer, flashinfer.__version__
        self.workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")

    def adopt(self, case):
        self.case = case
        blocks = [np.asarray(sequence.blocks) for sequence in case.sequences]
        used = [-(-n // BLOCK_SIZE) for n in case.lengths]
        self.indptr = torch.tensor(np.cumsum([0] + used), dtype=torch.int32)
        self.indices = torch.tensor(np.concatenate([b[:n] for b, n in zip(blocks, used)]), dtype=torch.int32).cuda()
        self.last = torch.tensor([(n - 1) % BLOCK_SIZE + 1 for n in case.lengths], dtype=torch.int32)
        self.query_indptr = torch.tensor(np.cumsum([0] + case.counts), dtype=torch.int32)
        self.out = torch.empty_like(case.q)
        self.sets = None
        return self

    def drop(self):
        self.case = self.sets = None

    def attend(self, wrapper, plan):
        plan()
        self.sets = [self.case.pages(layer) for layer in range(self.case.num_layers)]
        return [lambda kv=kv: wrapper.run(self.case.q, kv, out=self.out) for kv in self.sets]

    def decode(self):
        case = self.case
        fp8 = case.dtype != "bfloat16"
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True,
                                                                     backend="fa2" if fp8 else "auto")
        return self.attend(wrapper, lambda: wrapper.plan(
            self.indptr, self.indices, self.last, case.num_heads, case.num_kv_heads, HEAD_DIM, BLOCK_SIZE,
            q_data_type=torch.bfloat16, kv_data_type=DTYPES[case.dtype], o_data_type=torch.bfloat16))

    def prefill(self):
        case = self.case
        wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
        return self.attend(wrapper, lambda: wrapper.plan(
            self.query_indptr, self.indptr, self.indices, self.last, case.num_heads, case.num_kv_heads, HEAD_DIM,
            BLOCK_SIZE, causal=True, q_data_type=torch.bfloat16, kv_data_type=DTYPES[case.dtype]))

    def write_kv(self):
        case = self.case
        sequence = torch.repeat_interleave(torch.arange(len(case.counts)), torch.tensor(case.counts)).int().cuda()
        position = torch.cat([torch.arange(n - new, n) for n, new in zip(case.lengths, case.counts)]).int().cuda()
        self.sets = [case.pages(layer) for layer in range(case.num_layers)]
        tables = self.indices, self.indptr.cuda(), self.last.cuda()
        return [lambda kv=kv: self.flashinfer.append_paged_kv_cache(case.k, case.v, sequence, position, kv, *tables)
                for kv in self.sets]

    def result(self):
        return self.out.float()


class Dense:
    """PyTorch's attention by cuDNN over [sequences, heads, tokens, dims] copies of the same rows."""

    def adopt(self, case):
        self.case = case
        return self

    def drop(self):
        self.case = self.q = self.out = None

    def decode(self):
        case = self.case
        if len(set(case.lengths)) > 1 or case.lengths[0] % BLOCK_SIZE or case.dtype != "bfloat16":
            raise Unsupported
        blocks = torch.tensor(np.concatenate([np.asarray(s.blocks) for s in case.sequences]), device="cuda")
        shape = (len(case.lengths), case.lengths[0], case.num_kv_heads, HEAD_DIM)
        self.q = case.q.view(len(case.lengths), case.num_heads, 1, HEAD_DIM)
        calls = [lambda kv=self.copy(layer, blocks, shape): self.attend(*kv) for layer in range(case.num_layers)]
        try:
            calls[0]()
        except RuntimeError as error:
            print(f"without cuDNN: {error}", file=sys.stderr)
            raise Unsupported from error
        return calls

    def copy(self, layer, blocks, shape):
        return [pages[blocks].view(shape).transpose(1, 2).contiguous() for pages in self.case.pages(layer)]

    def attend(self, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            self.out = scaled_dot_product_attention(self.q, k, v, enable_gqa=self.q.shape[1] != k.shape[1])

    def result(self):
        return self.out.reshape(self.case.q.shape).float()


def time_graph(calls):
    """Microseconds of one call: the median over replays of a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(3 + NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def measure_reading():
    """GB/s of plain loads, with as many thread blocks a multiprocessor as is fastest."""
    import cupy

    data = torch.randint(0, 2**31 - 1, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    kernel = cupy.RawKernel(READ_KERNEL, "read_all")

    def time_with(blocks):
        times = []
        for _ in range(3 + NUM_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            with cupy.cuda.ExternalStream(stream()):
                kernel((blocks,), (512,), (data.data_ptr(), np.int64(READ_BYTES // 16), out.data_ptr()))
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[3:])

    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    return READ_BYTES / min(time_with(count * num_processors) for count in (1, 2, 4)) / 1e3


if __name__ == "__main__":
    main()
