"""Which cached block goes first: every policy against plain lists on random traces, and what hints change."""
import itertools
import time

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused
from .eviction_oracle import POLICIES, Oracle

every_policy = pytest.mark.parametrize("eviction", sorted(POLICIES))


class Block:
    def __init__(self, key):
        self.key, self.holders, self.level = key, 1, 0


class Replay:
    """What a trace of prompts must find and evict, with a few sequences open at a time."""

    def __init__(self, eviction, num_blocks, block_size):
        self.order, self.num_blocks, self.block_size = Oracle(eviction, num_blocks), num_blocks, block_size
        self.found = {}  # key -> block, of full blocks that are held or cached
        self.duplicates = {}  # key -> held blocks that have the same, the newest first
        self.num_held = self.num_cached = self.evictions = 0

    def open(self, tokens):
        """The blocks of a sequence that holds tokens, and how many of them were found."""
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        keys = [tuple(tokens[:end]) for end in ends]
        hits = list(itertools.takewhile(lambda block: block is not None, map(self.found.get, keys)))
        hits = hits[: (len(tokens) - 1) // self.block_size]
        for block in hits:
            if block.holders == 0:
                self.num_cached, self.num_held = self.num_cached - 1, self.num_held + 1
            block.holders += 1
            if block.holders == 1:
                self.order.hold(block)
            self.order.hit(block)
        blocks = list(hits)
        needed = -(-len(tokens) // self.block_size) - len(hits)
        while self.num_blocks - self.num_held - self.num_cached < needed:
            victim = self.order.victim()
            self.order.forget(victim)
            if self.duplicates.get(victim.key):
                self.found[victim.key] = self.duplicates[victim.key].pop(0)
            else:
                del self.found[victim.key]
            self.num_cached, self.evictions = self.num_cached - 1, self.evictions + 1
        for key in keys[len(hits):] + [None] * (len(tokens) % self.block_size > 0):
            block = Block(key)
            if key is not None and self.found.setdefault(key, block) is not block:
                self.duplicates.setdefault(key, []).insert(0, block)
            blocks.append(block)
        self.num_held += needed
        return blocks, len(hits)

    def close(self, blocks, level):
        for block in reversed(blocks):
            if self.order.name == "priority":
                block.level = max(getattr(block, "raised", level), level)
                block.raised = block.level
            block.holders -= 1
            if block.holders == 0:
                self.num_held -= 1
                if block.key is not None and self.found[block.key] is block:
                    self.num_cached += 1
                    self.order.cache(block)
                elif block.key is not None:
                    self.duplicates[block.key].remove(block)


def make_trace(rng, num_requests):
    """Prompts along a tree, some branches far more often than others."""
    for _ in range(num_requests):
        branches = np.minimum(rng.zipf(1.6, size=6), 6)
        tokens = [int(token) for branch in branches for token in (branch, branch + 100, branch)]
        yield tokens[: int(rng.integers(1, len(tokens) + 1))], int(rng.integers(-1, 3))


@every_policy
@pytest.mark.parametrize("block_size", [1, 2])
@pytest.mark.parametrize("num_blocks", [40, 60, 97])
def test_a_random_trace(device, eviction, block_size, num_blocks):
    rng = np.random.default_rng(num_blocks + block_size)
    cache = make_cache(device, num_blocks, block_size, eviction=eviction, hash_seed=1)  # of ghosts, few may collide
    model = Replay(eviction, num_blocks, block_size)
    is_open = []
    for number, (tokens, priority) in enumerate(make_trace(rng, 400)):
        while len(is_open) > rng.integers(0, 2):
            seq, blocks, level = is_open.pop(int(rng.integers(len(is_open))))
            seq.close()
            model.close(blocks, level)
        blocks, num_hits = model.open(tokens)
        seq = open_with(cache, tokens, priority=priority)
        assert seq.num_cached_tokens == num_hits * block_size, f"request {number}"
        assert cache.stats()["evictions"] == model.evictions, f"request {number}"
        is_open.append((seq, blocks, priority))
        if number % 50 == 0:
            cache.check()
    assert model.evictions > 100
    cache.check()
    states = count_states(cache)
    assert states[1] == model.num_cached and states[2] == model.num_held


@every_policy
def test_children_go_before_their_parents(device, eviction):
    cache = make_cache(device, 8, eviction=eviction)
    open_with(cache, range(32)).close()
    for kept in range(7, -1, -1):
        cache.evict(8 - kept)
        assert count_hit(cache, range(33)) // 4 == kept
        if kept == 5:  # a hit of what is left, by two sequences
            with cache.open(ids(range(33))), cache.open(ids(range(33))):
                pass


@every_policy
def test_what_nobody_holds_can_always_be_had(device, eviction):
    cache = make_cache(device, 6, 1, eviction=eviction)
    for _ in range(3):  # hits, and holders while their turns come
        open_with(cache, range(3)).close()
    with open_with(cache, range(4)) as parent, parent.fork():
        assert count_states(cache) == (2, 0, 4, 0)
        open_with(cache, [50, 51]).close()
        open_with(cache, [60, 61]).close()
        with refused(cache, pagedkv.OutOfBlocksError):
            cache.evict(3)
        assert cache.evict(2) == 2
    assert cache.evict(6) == 4
    assert count_states(cache) == (6, 0, 0, 0)


@every_policy
def test_eviction_order_is_explained(device, eviction):
    cache = make_cache(device, 4, eviction=eviction)
    open_with(cache, range(16)).close()
    places = {block["block"]: block["eviction_order"] for block in map(cache.explain, range(4))}
    assert sorted(places.values()) == [0, 1, 2, 3]
    queues = {"lfu": "lfu", "slru": "probation", "s3fifo": "small"}
    for block in range(4):
        told = cache.explain(block)
        assert told["queue"] == queues.get(eviction, eviction) and told["retention"] == told["hits"] == 0
    first = min(places, key=places.get)
    cache.evict(1)
    assert cache.explain(first)["state"] == "uncached"


def test_lfu_keeps_what_was_hit_more_often(device):
    cache = make_cache(device, 4, eviction="lfu")
    open_with(cache, range(4)).close()
    assert [count_hit(cache, range(5)) for _ in range(3)] == [4, 4, 4]
    open_with(cache, range(10, 14)).close()
    count_hit(cache, range(10, 15))
    cache.evict(3)
    assert cache.probe(ids(range(5))) == 4 and cache.probe(ids(range(10, 15))) == 0


def test_fifo_ignores_hits(device):
    cache = make_cache(device, 3, eviction="fifo")
    for start in (0, 10, 20):
        open_with(cache, range(start, start + 4)).close()
    count_hit(cache, range(5))
    cache.evict(1)
    assert cache.probe(ids(range(5))) == 0


def test_fifo_evicts_a_block_whose_turn_came_while_it_was_held_as_soon_as_it_is_released(device):
    cache = make_cache(device, 3, eviction="fifo")
    for start in (0, 10, 20):
        open_with(cache, range(start, start + 4)).close()
    with cache.open(ids(range(5))):
        cache.evict(1)
    assert [cache.probe(ids(range(start, start + 5))) for start in (0, 10, 20)] == [4, 0, 4]
    cache.evict(2)
    assert [cache.probe(ids(range(start, start + 5))) for start in (0, 10, 20)] == [0, 0, 4]


@pytest.mark.parametrize("eviction", ["slru", "s3fifo"])
def test_a_scan_does_not_push_out_what_is_used(device, eviction):
    cache = make_cache(device, 20, eviction=eviction)
    hot = range(1000, 1017)
    open_with(cache, hot).close()
    for _ in range(3):
        assert count_hit(cache, hot) == 16
    for start in range(0, 400, 4):
        open_with(cache, range(start, start + 4)).close()
    assert cache.probe(ids(hot)) == 16


def test_s3fifo_remembers_what_came_back(device):
    cache = make_cache(device, 20, eviction="s3fifo")
    for start in range(0, 100, 4):
        open_with(cache, range(start, start + 4)).close()
    assert cache.probe(ids(range(5))) == 0  # filtered, and remembered
    open_with(cache, range(4)).close()
    block = next(block for block in map(cache.explain, range(20)) if block.get("tokens") == [0, 1, 2, 3])
    assert block["queue"] == "main"


def test_priority_keeps_the_largest_of_the_sequences_that_held_a_block(device):
    cache = make_cache(device, 3, eviction="priority")
    open_with(cache, range(4), priority=5).close()
    open_with(cache, range(10, 14), priority=-3).close()
    open_with(cache, range(20, 24)).close()
    cache.open(ids(range(5)), priority=-9).close()
    order = [cache.explain(block)["retention"] for block in range(3)]
    assert sorted(order) == [-3, 0, 5]
    for evicted, left in ((1, [0, 20]), (2, [0]), (3, [])):
        cache.evict(evicted)
        assert [start for start in (0, 10, 20) if cache.probe(ids(range(start, start + 5)))] == left


def test_a_priority_before_the_block_was_registered_anew_does_not_count(device):
    cache = make_cache(device, 4, eviction="priority")
    seq = open_with(cache, range(4), priority=0)
    seq.truncate(2)
    with cache.open(ids(range(5)), priority=7) as other:
        assert other.num_cached_tokens == 4
    seq.append([9, 9])
    seq.close()
    assert [cache.explain(block)["retention"] for block in range(4) if cache.explain(block)["state"] == "cached"] == [0]


@every_policy
def test_hints_come_before_the_policy(device, eviction):
    cache = make_cache(device, 3, eviction=eviction)
    for start, priority in ((0, 1), (10, -1), (20, None)):
        seq = open_with(cache, range(start, start + 4))
        if priority is not None:
            seq.retain(priority=priority)
        seq.close()
    count_hit(cache, range(10, 15))
    for evicted, left in ((1, [0, 20]), (2, [0]), (3, [])):
        cache.evict(evicted)
        assert [start for start in (0, 10, 20) if cache.probe(ids(range(start, start + 5)))] == left
    cache.check()


@every_policy
def test_hints_end(device, eviction):
    cache = make_cache(device, 4, eviction=eviction)
    seq = open_with(cache, range(8))
    seq.retain(0, 4, priority=9)           # stays
    seq.retain(4, 8, priority=9, ttl=0.02)
    seq.close()
    open_with(cache, range(20, 24)).close()
    assert cache.evict(2) == 1 and cache.probe(ids(range(20, 25))) == 0 and cache.probe(ids(range(9))) == 8
    open_with(cache, range(30, 34)).close()
    time.sleep(0.03)
    open_with(cache, [77]).close()         # any call that may need blocks notices
    told = {block["tokens"][0]: block["retention"] for block in map(cache.explain, range(4)) if block.get("tokens")}
    assert told == {0: 9, 4: 0, 30: 0}
    assert cache.evict(3) == 2 and cache.probe(ids(range(9))) == 4
    cache.check()


def test_hints_are_for_tokens(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(14))
    seq.retain(5, 9, priority=3)
    hinted = [bool(cache.explain(block)["has_hint"]) for block in seq.blocks.tolist()]
    assert hinted == [False, True, True, False]
    seq.retain(6, 6, priority=7)  # none
    seq.retain(8, priority=4)
    assert [cache.explain(block)["retention"] for block in seq.blocks.tolist()] == [0, 3, 4, 4]
    for bad in ((-1, 2), (0, 15), (3, 2), (15, None)):
        with refused(cache, pagedkv.InvalidArgumentError, seq):
            seq.retain(*bad, priority=1)
    for bad in (0, -1, float("nan")):
        with refused(cache, pagedkv.InvalidArgumentError, seq):
            seq.retain(ttl=bad)
    seq.close()
    with pytest.raises(pagedkv.NotFoundError):
        seq.retain(priority=1)
    cache.check()


@every_policy
def test_victims_by_policy(device, eviction):
    cache = make_cache(device, 8, 1, eviction=eviction)
    first, second, third = (cache.open(ids([token])) for token in (1, 2, 3))
    for _ in range(2):
        second.append([7])
    for seq in (third, third, third, first):
        seq.append([8])
    order = {"fifo": [first, second, third], "lru": [second, third, first], "priority": [second, third, first]}
    assert cache.victims(6) == order.get(eviction, [first, second, third])
    first.append([9])  # now as many steps as the second: of these the younger one goes first
    if eviction not in order:
        assert cache.victims(1)[0] is second


def test_low_water(device):
    cache = make_cache(device, 8, low_water=5)
    assert cache.evict() == 0
    open_with(cache, range(24)).close()
    assert cache.evict() == 3 and count_states(cache) == (5, 3, 0, 0)
    with open_with(cache, range(100, 120)):
        assert cache.evict() == 3 and count_states(cache) == (3, 0, 5, 0)  # as many as can be had
    for bad in (-1, 2**63, "1"):
        with pytest.raises(pagedkv.InvalidArgumentError):
            make_cache(device, 8, low_water=bad)
    assert make_cache(device, 4).evict() == 0


def test_reuse_distance(device):
    cache = make_cache(device, 32)
    seq = open_with(cache, range(4))        # a use: registered
    assert count_hit(cache, range(5)) == 4  # none in between
    open_with(cache, range(10, 34))         # six others
    cache.touch(ids(range(4)))
    counts = cache.stats()["reuse_distance"]
    assert len(counts) == 32 and counts[0] == 1 and counts[2] == 1 and sum(counts) == 2
    seq.close()
