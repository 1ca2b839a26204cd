"""One cache over several devices beside a cache of one device: the same calls on both, the same results.

A `Side` gives each device its share of the rows of the whole model, by what `cache.shards` says, and puts the outputs
together again."""
import numpy as np
import pytest

import pagedkv

from .arrays import HostArrays

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 6, 12, 16, 4


def list_device_sets():
    """pytest parameters: (devices, the single device to compare with), of hosts and of the CUDA devices that are there."""
    sets = [(["host:0", "host:1"], "host"), (["host:0", "host:1", "host:2"], "host")]
    num_cuda = pagedkv.cuda_info()["num_devices"] if pagedkv.cuda_info()["is_usable"] else 0
    reason = f"{num_cuda} CUDA devices are usable here"
    for devices, wanted in ((["cuda:0", "cuda:0"], 1), (["cuda:0", "cuda:1"], 2)):
        sets.append(pytest.param((devices, "cuda:0"), marks=pytest.mark.skipif(num_cuda < wanted, reason=reason)))
    return sets


@pytest.fixture(params=list_device_sets(), ids=str)
def devices(request):
    return request.param


@pytest.fixture(params=["heads", "layers"])
def shard(request):
    return request.param


class CudaArrays:
    def __init__(self, ordinal):
        self.cupy = pytest.importorskip("cupy", reason="the CUDA conformance tests move arrays with CuPy")
        self.ordinal = ordinal

    def put(self, array):
        with self.cupy.cuda.Device(self.ordinal):
            return self.cupy.asarray(np.ascontiguousarray(array))

    def empty(self, shape, dtype):
        with self.cupy.cuda.Device(self.ordinal):
            return self.cupy.empty(shape, dtype)

    def get(self, array):
        with self.cupy.cuda.Device(self.ordinal):
            self.cupy.cuda.Device(self.ordinal).synchronize()
            return self.cupy.asnumpy(array)

    def get_table(self, table):
        with self.cupy.cuda.Device(self.ordinal):  # CuPy would copy it to the current device otherwise
            return self.get(self.cupy.asarray(table))


def arrays_of(device):
    return HostArrays() if device.startswith("host") else CudaArrays(int(device.removeprefix("cuda:")))


class Side:
    """A cache and a batch of it, on one device or several."""

    def __init__(self, where, shard=None, num_blocks=64, dtype="float32", formats=("table", "csr", "pointers"),
                 layout=None, **options):
        kind = {"device": where} if isinstance(where, str) else {"devices": where, "shard": shard}
        shape = {"num_layers": NUM_LAYERS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM,
                 "block_size": BLOCK_SIZE} | (layout or {})
        self.cache = pagedkv.Cache(pagedkv.Layout(dtype=dtype, **shape), num_blocks=num_blocks, hash_seed=7, **kind,
                                   **options)
        self.batch = self.cache.batch(16, 128, formats=formats)
        self.arrays = [arrays_of(device) for device in self.cache.devices]
        self.sequences = []

    def holders(self, layer):
        """(index, KV heads) of each device that holds the layer."""
        for index, part in enumerate(self.cache.shards):
            if part["first_layer"] <= layer < part["first_layer"] + part["num_layers"]:
                yield index, slice(part["first_kv_head"], part["first_kv_head"] + part["num_kv_heads"])

    def write(self, layer, k, v, **options):
        for index, heads in self.holders(layer):
            put = self.arrays[index].put
            self.cache.write_kv(layer, self.batch, put(k[:, heads]), put(v[:, heads]), shard=index, **options)

    def attend(self, layer, q, **options):
        """(out, lse) of all heads."""
        group = NUM_HEADS // NUM_KV_HEADS
        outs, lses = [], []
        for index, heads in self.holders(layer):
            own = q[:, heads.start * group : heads.stop * group]
            arrays = self.arrays[index]
            out, lse = arrays.empty(own.shape, own.dtype), arrays.empty(own.shape[:2], np.float32)
            self.cache.attend(layer, self.batch, arrays.put(own), out=out, lse=lse, shard=index, **options)
            outs.append(arrays.get(out))
            lses.append(arrays.get(lse))
        return np.concatenate(outs, 1), np.concatenate(lses, 1)

    def gather(self, layer, index, count):
        """K and V of the first tokens of a sequence of the step, as they are stored, all heads."""
        keys, values = [], []
        for device, heads in self.holders(layer):
            arrays = self.arrays[device]
            shape = (count, heads.stop - heads.start, HEAD_DIM)
            kind = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[self.cache.layout.dtype]
            k, v = arrays.empty(shape, kind), arrays.empty(shape, kind)
            self.cache.gather_kv(layer, self.batch, index, 0, count, k, v, shard=device)
            keys.append(arrays.get(k))
            values.append(arrays.get(v))
        return np.concatenate(keys, 1), np.concatenate(values, 1)

    def tables(self):
        batch = self.batch
        return [np.array(table) for table in (batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.slot_mapping,
                                              batch.positions, batch.indptr, batch.indices, batch.last_block_len)]


class Pair:
    """A cache over several devices, and one of a single device that is told the same."""

    def __init__(self, devices, shard, seed=0, **options):
        several, single = devices
        self.sides = [Side(several, shard, **options), Side(single, **options)]
        self.is_exact = single == "host"
        self.remember(seed)

    def remember(self, seed):
        self.rng = np.random.default_rng(seed)
        self.num_layers = self.sides[0].cache.layout.num_layers
        self.kv_rows = self.rng.standard_normal((3, 2, 997, NUM_KV_HEADS, HEAD_DIM), np.float32)

    def each(self, call):
        """Calls call(side) on both: the results, or both must refuse alike."""
        results = []
        for side in self.sides:
            try:
                results.append(call(side))
            except pagedkv.PagedKVError as error:
                results.append((type(error), str(error)))
        return results

    def same(self, call):
        """The result of a call that gives the same on both sides."""
        first, second = self.each(call)
        assert first == second
        return first

    def step(self, indices, counts, tokens, **options):
        """prepare, then write_kv and attend in every layer; all must agree."""

        def prepare(side):
            side.batch.prepare([side.sequences[i] for i in indices], counts, tokens=tokens, **options)
            return "prepared"

        if self.same(prepare) != "prepared":
            return False
        for first, second in zip(self.sides[0].tables(), self.sides[1].tables()):
            np.testing.assert_array_equal(first, second)
        single = self.sides[1].batch
        num_tokens, positions = single.num_tokens, np.asarray(single.positions)
        # A row is that of its token and position, so that equal prefixes are equal whoever computed them.
        names = self.rng.integers(0, 997, num_tokens) if tokens is None else np.asarray(tokens, np.int64)
        for layer in range(self.num_layers):
            k, v = self.kv_rows[layer % 3][:, (31 * names + 7 * positions) % 997]
            q = self.rng.standard_normal((num_tokens, NUM_HEADS, HEAD_DIM), np.float32)
            for side in self.sides:
                side.write(layer, k, v)
            self.compare(*(side.attend(layer, q) for side in self.sides))
        return True

    def compare(self, first, second):
        for one, other in zip(first, second):
            if self.is_exact:
                np.testing.assert_array_equal(one, other)
            else:  # another number of heads may mean another kernel
                np.testing.assert_allclose(one, other, atol=2e-3, rtol=2e-3)

    def compare_stored(self):
        """Every token of every sequence, in every layer."""
        for i in range(len(self.sides[0].sequences)):
            lengths = [side.sequences[i].length for side in self.sides]
            assert lengths[0] == lengths[1]
            for side in self.sides:
                side.batch.prepare([side.sequences[i]], [0])
            for layer in range(self.num_layers):
                first, second = (side.gather(layer, 0, lengths[0]) for side in self.sides)
                for one, other in zip(first, second):
                    np.testing.assert_array_equal(one, other)

    def check(self):
        for side in self.sides:
            side.cache.check()
        counters = [{key: value for key, value in side.cache.stats().items()
                     if key not in ("block_bytes", "base", "device", "device_free_bytes", "uploaded_bytes")
                     and not key.endswith("_rate")}
                    for side in self.sides]
        assert counters[0] == counters[1]
        blocks = [[np.asarray(seq.blocks).tolist() for seq in side.sequences] for side in self.sides]
        assert blocks[0] == blocks[1]


class SharedOut(Side):
    """shard="sequences": every device has whole sequences, and a part of the step."""

    def __init__(self, devices, **options):
        super().__init__(devices, "sequences", **options)

    def write(self, layer, k, v, **options):
        for index, (part, arrays) in enumerate(zip(self.batch.parts, self.arrays)):
            rows = part.token_places
            self.cache.write_kv(layer, self.batch, arrays.put(k[rows]), arrays.put(v[rows]), shard=index, **options)

    def attend(self, layer, q, **options):
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        for part, own, arrays in zip(self.batch.parts, self.cache.parts, self.arrays):
            rows = part.token_places
            own_out, own_lse = arrays.empty(q[rows].shape, q.dtype), arrays.empty(q[rows].shape[:2], np.float32)
            own.attend(layer, part, arrays.put(q[rows]), out=own_out, lse=own_lse, **options)  # a part is a cache
            out[rows], lse[rows] = arrays.get(own_out), arrays.get(own_lse)
        return out, lse

    def gather(self, layer, index, count):
        for device, part in enumerate(self.batch.parts):
            place = np.flatnonzero(np.asarray(part.sequence_places) == index)
            if len(place) == 0:
                continue
            arrays = self.arrays[device]
            kind = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[self.cache.layout.dtype]
            k, v = (arrays.empty((count, NUM_KV_HEADS, HEAD_DIM), kind) for _ in range(2))
            self.cache.gather_kv(layer, self.batch, int(place[0]), 0, count, k, v, shard=device)
            return arrays.get(k), arrays.get(v)

    def tables(self):
        """None: block ids are of each device."""
        return []


class SharedOutPair(Pair):
    def __init__(self, devices, seed=0, **options):
        several, single = devices
        num_blocks = options.pop("num_blocks", 64)
        self.sides = [SharedOut(several, num_blocks=num_blocks, **options),
                      Side(single, num_blocks=num_blocks * len(several), **options)]
        self.is_exact = single == "host"
        self.remember(seed)

    def check(self):
        for side in self.sides:
            side.cache.check()
