"""Three streams of one GPU, one of them stalled by a kernel that spins until the host lets it go. Who takes, hits or copies
what it has queued work on waits for it, and reads the right data; who has nothing to do with it does not wait."""
import time

import numpy as np
import pytest

import pagedkv

NUM_HEADS, HEAD_DIM, BLOCK_SIZE, LENGTH = 2, 64, 16, 64
SECONDS = 20  # after which the spinning kernel gives up, and the test fails instead of hanging

SPIN = r"""
extern "C" __global__ void spin(const volatile int *may_go, unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*may_go == 0 && now - start < nanoseconds);
}
"""


class Device:
    """A cache, and work on its streams: rows of one value are written, and attended over, so that a sequence of rows of
    one value gives that value."""

    def __init__(self, cupy, num_blocks, prefix_caching):
        self.cupy = cupy
        layout = pagedkv.Layout(num_layers=1, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype="float16",
                                block_size=BLOCK_SIZE)
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device="cuda", prefix_caching=prefix_caching)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        # With a bound on the length tables never grow, which would wait for the device.
        self.batches = [self.cache.batch(2, 2 * LENGTH, max_sequence_length=2 * LENGTH, num_heads=NUM_HEADS)
                        for _ in range(3)]
        shape = (2 * LENGTH, NUM_HEADS, HEAD_DIM)
        self.values = [cupy.full(shape, value, "float16") for value in range(8)]
        self.query = cupy.ones((1, NUM_HEADS, HEAD_DIM), "float16")
        self.outs = [cupy.zeros((1, NUM_HEADS, HEAD_DIM), "float16") for _ in range(8)]
        self.kernel = cupy.RawKernel(SPIN, "spin")
        self.flag = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
        cupy.cuda.runtime.deviceSynchronize()

    def append(self, i, seq, count, value, tokens=None):
        """On stream i: a step of the sequence, whose rows hold the value."""
        self.batches[i].prepare([seq], [count], tokens=tokens, stream=self.streams[i].ptr)
        rows = self.values[value][:count]
        self.cache.write_kv(0, self.batches[i], rows, rows, stream=self.streams[i].ptr)

    def attend(self, i, seq, which, value=0):
        """One more token, of this value, that attends over the sequence into outs[which]."""
        self.append(i, seq, 1, value)
        self.cache.attend(0, self.batches[i], self.query, out=self.outs[which], stream=self.streams[i].ptr)

    def stall(self, i):
        self.flag[0] = 0
        address = self.flag.ctypes.data  # pinned: the device knows it under the same address
        with self.streams[i]:
            self.kernel((1,), (1,), (np.uint64(address), np.uint64(SECONDS * 10**9)))

    def go_on(self):
        self.flag[0] = 1
        self.cupy.cuda.runtime.deviceSynchronize()

    def mean(self, which):
        """Only once the stall is over: CuPy takes pinned memory for the copy, which waits for the device."""
        return float(self.cupy.asnumpy(self.outs[which]).astype(np.float64).mean())

    def is_done(self, i):
        return self.streams[i].done


@pytest.fixture(params=[False, True], ids=["plain", "prefixes"])
def gpu(device, request):
    if device == "host":
        pytest.skip("the host has no streams: tests/unit/stream_order.cc")
    cupy = pytest.importorskip("cupy")
    warm = Device(cupy, 16, False)  # loads every kernel: loading one may wait for the device
    for i in range(3):
        seq = warm.cache.open([])
        warm.append(i, seq, 20, 1)
        child = seq.fork()
        warm.attend(i, seq, i)
        child.close()
        seq.close()  # before its stream is destroyed
    warm.stall(0)
    warm.go_on()
    warm.cache.close()
    made = Device(cupy, 16, request.param)
    yield made
    made.go_on()
    made.cache.close()  # before its streams: a sequence that the garbage collector closes later still names one


def wait_until_done(gpu, i):
    end = time.monotonic() + SECONDS / 2
    while not gpu.is_done(i):
        assert time.monotonic() < end, f"stream {i} is held up by a stream that it has nothing to do with"
        time.sleep(0.001)


def test_reuse_waits_and_others_do_not(gpu):
    a, b, c = (gpu.cache.open([]) for _ in "abc")
    gpu.append(0, a, LENGTH, 1)
    gpu.stall(0)
    gpu.attend(0, a, 0, 1)  # will read the rows of a once it may
    taken = a.blocks.tolist()
    a.close()
    gpu.append(1, b, LENGTH, 3)  # the same blocks
    gpu.attend(1, b, 1, 3)
    assert set(b.blocks.tolist()) <= set(taken)
    gpu.append(2, c, LENGTH, 5)
    gpu.attend(2, c, 2, 5)
    assert not set(c.blocks.tolist()) & set(taken)
    wait_until_done(gpu, 2)
    assert not gpu.is_done(0) and not gpu.is_done(1)
    gpu.go_on()
    assert gpu.mean(0) == 1 and gpu.mean(1) == 3 and gpu.mean(2) == 5


def test_a_hit_waits_for_its_writer(gpu):
    tokens = list(range(LENGTH))
    a, c = gpu.cache.open(tokens), gpu.cache.open([])
    gpu.stall(0)
    gpu.append(0, a, LENGTH, 2, tokens=tokens)
    b = gpu.cache.open([*tokens, 7])
    if b.length == 0:
        pytest.skip("without prefixes nothing is hit")
    assert b.length == LENGTH
    gpu.attend(1, b, 1, 2)
    gpu.append(2, c, LENGTH, 5)
    gpu.attend(2, c, 2, 5)
    wait_until_done(gpu, 2)
    assert not gpu.is_done(1)
    gpu.go_on()
    assert gpu.mean(1) == 2 and gpu.mean(2) == 5


def attend_over(value):
    """LENGTH - 8 rows of 2 and 9 of another value, by a query of ones."""
    rows = np.array([2.0] * (LENGTH - 8) + [value] * 9)
    weights = np.exp((rows - value) * HEAD_DIM / np.sqrt(HEAD_DIM))
    return (weights * rows).sum() / weights.sum()


def test_a_copy_waits_and_is_waited_for(gpu):
    """b, a fork of a, copies the shared block on its stream; then a, the only holder left, writes into it in place."""
    a = gpu.cache.open([])
    gpu.append(0, a, LENGTH - 8, 2)
    b = a.fork()
    gpu.stall(1)
    gpu.append(1, b, 8, 4)  # its copy comes behind the stall
    gpu.attend(1, b, 1, 4)
    gpu.append(0, a, 8, 6)
    assert not gpu.is_done(0)
    gpu.attend(0, a, 0, 6)
    gpu.go_on()
    assert gpu.mean(1) == pytest.approx(attend_over(4), abs=0.01)
    assert gpu.mean(0) == pytest.approx(attend_over(6), abs=0.01)


def test_a_sequence_that_changes_streams(gpu):
    a = gpu.cache.open([])
    gpu.append(0, a, LENGTH // 2, 3)
    gpu.stall(0)
    gpu.append(0, a, LENGTH // 2, 3)
    gpu.attend(1, a, 1, 3)
    assert not gpu.is_done(1)
    gpu.go_on()
    assert gpu.mean(1) == 3


def test_streams_that_come_and_go(gpu):
    """Handles are destroyed with work of theirs still to be waited for, and come back as other streams."""
    for round in range(20):
        value = 1 + round % 6
        gpu.streams[0] = gpu.cupy.cuda.Stream(non_blocking=True)
        seq = gpu.cache.open([])
        gpu.append(0, seq, LENGTH, value)
        gpu.attend(0, seq, value, value)
        seq.close()
        gpu.streams[0] = None  # destroyed
        assert gpu.cache.check()
        gpu.cupy.cuda.runtime.deviceSynchronize()
        assert gpu.mean(value) == value
    gpu.streams[0] = gpu.cupy.cuda.Stream(non_blocking=True)


def test_a_stream_that_captures(gpu):
    a, b = gpu.cache.open([]), gpu.cache.open([])
    gpu.append(0, a, LENGTH, 1)
    gpu.append(1, b, LENGTH, 2)
    gpu.streams[0].begin_capture()
    try:
        with pytest.raises(pagedkv.InvalidArgumentError, match="capturing"):
            gpu.append(1, b, 1, 2)
        assert b.length == LENGTH
    finally:
        gpu.streams[0].end_capture()
    gpu.attend(1, b, 1, 2)
    gpu.go_on()
    assert gpu.mean(1) == 2
