"""One cache over several devices: two halves of the heads, two halves of the layers, or whole sequences on each.

Runs anywhere: "host:0" and "host:1" are independent devices over the host's memory. On a machine with two GPUs give
"cuda:0" and "cuda:1" and arrays that live there; the calls are the same."""

import numpy as np

import pagedkv

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 4, 4, 8, 32
DEVICES = ["host:0", "host:1"]
layout = pagedkv.Layout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype="float32", block_size=16)
prompt = list(range(40))
rng = np.random.default_rng(0)
k, v = (rng.standard_normal((NUM_LAYERS, len(prompt), NUM_KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
q = rng.standard_normal((NUM_LAYERS, len(prompt), NUM_HEADS, HEAD_DIM), np.float32)


def run(**where):
    """Attention of every layer over the prompt, put together from what the devices give."""
    with pagedkv.Cache(layout, num_blocks=32, **where) as cache:
        batch = cache.batch(max_sequences=4, max_tokens=64)
        seq = cache.open(prompt)
        batch.prepare([seq], [len(prompt)], tokens=prompt)  # one for all devices
        outs = []
        for layer in range(NUM_LAYERS):
            pieces = []
            for device, part in enumerate(cache.shards):
                if not part["first_layer"] <= layer < part["first_layer"] + part["num_layers"]:
                    continue
                heads = slice(part["first_kv_head"], part["first_kv_head"] + part["num_kv_heads"])
                group = NUM_HEADS // NUM_KV_HEADS
                cache.write_kv(layer, batch, k[layer][:, heads], v[layer][:, heads], shard=device)
                own_q = q[layer][:, heads.start * group : heads.stop * group]
                pieces.append(cache.attend(layer, batch, own_q, shard=device))
            outs.append(np.concatenate(pieces, axis=1))
        names = [f"{part['device']}: {part['num_layers']} layers of {part['num_kv_heads']} heads" for part in cache.shards]
        print(f"{cache.shard or 'one device':10}  {', '.join(names)}")
        return np.stack(outs)


expected = run(device="host")
for shard in ("heads", "layers"):
    assert np.array_equal(run(devices=DEVICES, shard=shard), expected)
print("outputs    equal, bit for bit")

cache = pagedkv.Cache(layout, num_blocks=32, devices=DEVICES, shard="sequences")
batch = cache.batch(max_sequences=4, max_tokens=64)
seqs = cache.open_many([prompt[:20], prompt[20:30]])
batch.prepare(seqs, [20, 10], tokens=prompt[:30])
for own, step in zip(cache.parts, batch.parts):
    rows = step.token_places  # the rows of the step that are on this device
    own.write_kv(0, step, k[0][rows], v[0][rows])
    own.attend(0, step, q[0][rows])
print(f"sequences   on devices {[seq.device_index for seq in seqs]}, rows {[len(step.token_places) for step in batch.parts]}")
seqs[0].migrate(1)
print(f"migrated    on devices {[seq.device_index for seq in seqs]}, {seqs[0].length} tokens")
assert cache.parts[1].probe(prompt[:20]) == 16  # its full block is found there now
