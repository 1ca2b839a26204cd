"""The policy laboratory: hits of every eviction policy, and of the best one there could be, against the pool's size.

Requests come one at a time: a prompt takes its hit, stores the rest and is released before the next one comes. What
is written about a policy is what the library did. To keep it small, a block of N tokens is stood for by one token of
caches whose blocks hold one: blocks with equal tokens and equal predecessors get the same number, and the started last
block of a prompt is appended as a token that is not known, so that it is held like any other and never found. Such a
cache hits, holds and evicts exactly the blocks that one with blocks of N tokens does.

The optimum is Belady's: knowing the future, keep the blocks that are needed again soonest. A hit needs the whole
prefix, which costs the optimum nothing: a block is never needed before its predecessor is, so among blocks that are
needed again in the same request the later in the prompt go first, and what is kept always is a set of whole prefixes.
Pools are the same in all else: while a request runs all of its blocks are held, one that is larger than the pool is
not run, and of a prompt one token is always left to compute.
"""

import heapq
from dataclasses import dataclass

import numpy as np

POLICIES = ("lru", "lfu", "fifo", "slru", "s3fifo", "priority")
NUM_SIZES = 8
PLAIN_BLOCK = 16  # tokens of a block where the trace has no hash ids
NEVER = np.iinfo(np.int64).max


@dataclass
class Accesses:
    """The blocks of each request, flat: those of request r are blocks[offsets[r] : offsets[r + 1]]."""

    block_size: int  # tokens
    blocks: np.ndarray  # int64: full blocks by number, 0 to num_blocks - 1
    offsets: np.ndarray  # int64 [requests + 1]
    lengths: np.ndarray  # int64 [requests]: tokens of the prompts
    priorities: np.ndarray  # int64 [requests]
    num_blocks: int  # different full blocks

    @property
    def needed(self):
        """Blocks that each request holds while it runs, [requests]."""
        return -(-self.lengths // self.block_size)

    @property
    def num_usable(self):
        """Blocks that each request may hit, [requests]: one token is always computed."""
        return np.maximum(self.lengths - 1, 0) // self.block_size

    @property
    def footprint(self):
        """Blocks of a pool that never evicts: all different full blocks, and one that is started or a duplicate."""
        return self.num_blocks + 1

    def __len__(self):
        return len(self.lengths)


@dataclass
class Curve:
    """What one policy did in pools of the given sizes."""

    hit_tokens: list
    evictions: list


def find_accesses(trace, block_size=None):
    """Numbers the blocks of a trace's prompts. block_size: tokens; None is what a hash id stands for, else 16."""
    block_size = block_size or trace.hash_block_size or PLAIN_BLOCK
    numbers = {}  # (number of the predecessor, namespace, content) -> number
    num_unique = 0  # blocks of requests that tell nothing about their tokens; their numbers are negative for now
    flat, counts = [], []
    for index, request in enumerate(trace.requests):
        num_full = request.prompt_length // block_size
        contents = _find_contents(trace, index, block_size, num_full)
        namespaces = _find_namespaces(request, block_size, len(contents))
        parent = None
        blocks = []
        for content, namespace in zip(contents, namespaces):
            parent = numbers.setdefault((parent, namespace, content), len(numbers))
            blocks.append(parent)
        for _ in range(num_full - len(blocks)):
            num_unique += 1
            blocks.append(-num_unique)
        flat.extend(blocks)
        counts.append(num_full)
    blocks = np.array(flat, dtype=np.int64)
    blocks[blocks < 0] = len(numbers) - 1 - blocks[blocks < 0]
    priorities = np.array([request.priority for request in trace.requests], dtype=np.int64)
    return Accesses(block_size, blocks, np.concatenate(([0], np.cumsum(counts))).astype(np.int64), trace.prompt_lengths,
                    priorities, len(numbers) + num_unique)


def _find_namespaces(request, block_size, count):
    """That of each of the first blocks; the block that a region starts in belongs to it as a whole."""
    namespaces = [request.namespace] * count
    for start, namespace in request.regions:
        first = start // block_size
        namespaces[first:] = [namespace] * len(namespaces[first:])
    return namespaces


def _find_contents(trace, index, block_size, num_full):
    """What tells the full blocks of a prompt apart, as far as the trace tells it."""
    request = trace.requests[index]
    if request.hash_ids is None and request.prompt is None:
        return []
    if request.hash_ids is not None and trace.hash_block_size % block_size == 0:
        ratio = trace.hash_block_size // block_size
        parts = request.hash_ids[:, None] * ratio + np.arange(ratio)
        return parts.reshape(-1)[:num_full].tolist()
    tokens = trace.prompt_tokens(index)[: num_full * block_size]
    return [row.tobytes() for row in tokens.reshape(num_full, block_size)]


def choose_sizes(accesses, count=NUM_SIZES):
    """Pool sizes in blocks, each twice the one before, up to one that never evicts."""
    return sorted({max(1, accesses.footprint >> shift) for shift in range(count)})


def run_policy(accesses, policy, sizes, advance=None):
    """Drives one cache of each size with the same requests, in one pass; advance() is called for each request."""
    from pagedkv import Cache

    caches = [Cache(make_layout(), num_blocks=size, device="host", eviction=policy) for size in sizes]
    try:
        bank = list(zip(caches, sizes))
        offsets = accesses.offsets.tolist()
        priorities = accesses.priorities.tolist()
        for index, needed in enumerate(accesses.needed.tolist()):
            tokens = accesses.blocks[offsets[index] : offsets[index + 1]]
            asked = appended = tokens
            if needed > len(tokens):  # a started last block
                asked, appended = np.append(tokens, 0), np.append(tokens, -1)
            for cache, size in bank:
                if needed <= size:
                    sequence = cache.open(asked, priority=priorities[index])
                    sequence.append(appended[sequence.length :])
                    sequence.close()
            if advance is not None:
                advance()
        stats = [cache.stats() for cache in caches]
    finally:
        for cache in caches:
            cache.close()
    hit_tokens = [entry["hit_tokens"] * accesses.block_size for entry in stats]
    return Curve(hit_tokens, [entry["evictions"] for entry in stats])


def make_layout():
    """Blocks of one token that are as small as blocks can be."""
    from pagedkv import Layout

    return Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float8_e4m3", block_size=1)


def run_optimal(accesses, sizes, advance=None):
    """Belady's optimum in pools of the given sizes."""
    results = [_run_optimal(accesses, size, advance) for size in sizes]
    return Curve([hits * accesses.block_size for hits, _ in results], [evictions for _, evictions in results])


def _run_optimal(accesses, size, advance):
    """Hits and evictions, in blocks."""
    needed = accesses.needed
    runs = needed <= size
    next_use = find_next_use(accesses, runs).tolist()
    blocks, offsets, needed = accesses.blocks.tolist(), accesses.offsets.tolist(), needed.tolist()
    num_usable = accesses.num_usable.tolist()
    deepest = max(needed, default=0) + 1
    kept = {}  # block -> its rank: when it is needed again, and then how deep in the prompt
    order = []  # heap of (-rank, block), with entries that do not hold any more
    hits = evictions = 0
    for index in np.flatnonzero(runs).tolist():
        first, end = offsets[index], offsets[index + 1]
        own = blocks[first:end]
        for block in own[: num_usable[index]]:
            if block not in kept:
                break
            hits += 1
        for block in own:
            kept.pop(block, None)
        room = size - needed[index]
        while len(kept) > room:
            rank, block = heapq.heappop(order)
            if kept.get(block) == -rank:
                del kept[block]
                evictions += 1
        for depth, (block, use) in enumerate(zip(own, next_use[first:end])):
            if use != NEVER:  # else it is worth nothing, and forgotten at once
                kept[block] = rank = use * deepest + depth
                heapq.heappush(order, (-rank, block))
        if advance is not None:
            advance()
    return hits, evictions


def find_next_use(accesses, runs):
    """For each access the next request that runs and may hit the block, NEVER if there is none; int64 [accesses]."""
    counts = np.diff(accesses.offsets)
    request = np.repeat(np.arange(len(accesses)), counts)
    depth = np.arange(len(accesses.blocks)) - np.repeat(accesses.offsets[:-1], counts)
    is_use = runs[request] & (depth < accesses.num_usable[request])
    # Accesses of one block together, in order of time; then, from behind, the first use after each.
    order = np.lexsort((request, accesses.blocks))
    block, time = accesses.blocks[order], np.where(is_use[order], request[order], len(accesses))
    key = block * (len(accesses) + 1) + time
    after = np.minimum.accumulate(key[::-1])[::-1]
    found = np.full(len(key), NEVER, dtype=np.int64)
    if len(key) > 1:
        following = after[1:]
        is_same = (following // (len(accesses) + 1) == block[:-1]) & (following % (len(accesses) + 1) != len(accesses))
        found[:-1][is_same] = following[is_same] % (len(accesses) + 1)
    result = np.empty_like(found)
    result[order] = found
    return result
