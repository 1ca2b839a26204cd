"""Requests through a small cache in Python: a prefix hit, a fork, and a pool that runs out.

    python quickstart.py
"""

import numpy as np

import pagedkv

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 2, 64


def make_rows(tokens, num_heads):
    """Stands for a model: some value for each token, head and element."""
    elements = np.arange(num_heads * HEAD_DIM).reshape(num_heads, HEAD_DIM)
    return np.sin(np.asarray(tokens)[:, None, None] * 31 + elements).astype(np.float32)


def run_step(cache, batch, sequences, tokens):
    """Appends to each sequence its tokens, and returns the outputs of the last layer."""
    flat = np.concatenate([np.asarray(part, dtype=np.int64) for part in tokens])
    batch.prepare(sequences, [len(part) for part in tokens], tokens=flat)
    kv, q = make_rows(flat, NUM_KV_HEADS), make_rows(flat, NUM_HEADS)
    for layer in range(NUM_LAYERS):
        cache.write_kv(layer, batch, kv, kv)
        out = cache.attend(layer, batch, q)
    return out


def main():
    layout = pagedkv.Layout(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, dtype="float32", block_size=16)
    prompt = list(range(1000, 1100))
    with pagedkv.Cache(layout, num_blocks=16, device="host") as cache:
        batch = cache.batch(max_sequences=8, max_tokens=256)
        for request in range(2):
            sequence = cache.open(prompt)
            print(f"request {request}: {sequence.num_cached_tokens} of {len(prompt)} prompt tokens are cached")
            out = run_step(cache, batch, [sequence], [prompt[sequence.num_cached_tokens :]])
            print(f"  computed {len(out)} tokens; the last one's output begins with {out[-1, 0, 0]:.4f}")
            if request == 0:
                sequence.close()

        # Two answers to one prompt share all blocks of it but the one that both write into.
        other = sequence.fork()
        run_step(cache, batch, [sequence, other], [[7], [8]])
        print(f"blocks: {sequence.blocks.tolist()} and {other.blocks.tolist()}")

        # A refused call changes nothing; the cache says whom to preempt.
        try:
            sequence.reserve(150)
        except pagedkv.OutOfBlocksError as error:
            print(f"refused: {error.needed} blocks needed, {error.available} available")
        victims = cache.victims(1)
        print(f"closing {len(victims)} sequence gives blocks back")
        for victim in victims:
            victim.close()
        cache.check()


if __name__ == "__main__":
    main()
