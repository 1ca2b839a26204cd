"""Random calls on caches with tiers of random sizes: whatever is hit has the K and V that it ought to have."""
import os
import random

import pytest

import pagedkv
from conformance.marked import MarkedCache
from conformance.places import SHARDED

NUM_SEEDS = int(os.environ.get("PAGEDKV_FUZZ_SEEDS", 12))
NUM_CALLS = 120
SHARDED_OVER_HOST = [place for place in SHARDED if "cuda" not in place]


class Walk:
    """One cache after another on the same file, with what is open in it."""

    def __init__(self, seed, path):
        self.random = random.Random(seed)
        self.path, self.rows = path, {}
        self.options = self.choose_options()
        self.make()

    def choose_options(self):
        pick = self.random
        plain = MarkedCache("host", 1, block_size=4)
        options = dict(num_blocks=pick.randint(6, 24), block_size=4,
                       host_tier=plain.format.block_bytes * pick.choice([1, 2, 3, 8, 30]),
                       eviction=pick.choice(["lru", "lfu", "fifo", "slru", "s3fifo", "priority"]),
                       partial_reuse=pick.random() < 0.4, tier_min_hits=pick.choice([0, 0, 0, 1]))
        if pick.random() < 0.3:
            options.update(window=6, sinks=pick.choice([0, 4]))
        if pick.random() < 0.6:
            slot_bytes = -(-(128 + plain.format.block_bytes) // 4096) * 4096
            options.update(disk_tier=self.path, disk_tier_bytes=4096 + slot_bytes * pick.choice([1, 3, 10, 50]))
        return options

    def make(self):
        place = self.random.choice(["host", *SHARDED_OVER_HOST])  # the file is of the whole model
        self.world = MarkedCache(place, **self.options)
        self.world._rows = self.rows
        self.open, self.offloaded = [], []

    def prompt(self):
        pick = self.random
        length, cut = pick.randint(0, 30), pick.randint(0, 30)
        kind = 100 * pick.randint(1, 3)
        return [kind + i if i < cut else 1000 + pick.randint(0, 2) for i in range(length)]

    def call(self):
        pick, world, cache = self.random, self.world, self.world.cache
        kind = pick.randint(0, 15)
        if kind <= 4:
            salts = [(pick.choice([4, 6, 8]), pick.randint(1, 2))] if pick.random() < 0.3 else None
            prompt = self.prompt()
            marked = world.open(prompt, namespace=pick.randint(0, 1), salts=salts, priority=pick.randint(0, 2))
            self.open.append(marked)
            if pick.random() < 0.2:
                marked = self.open[-1] = world.adopt(marked.seq, prompt[:marked.seq.rematch(prompt)])
            world.step([(marked, prompt[len(marked.tokens):])])
        elif kind <= 6 and self.open:
            self.open.pop(pick.randrange(len(self.open))).seq.close()
        elif kind == 7 and self.open:
            marked = pick.choice(self.open)
            world.step([(marked, [2000 + pick.randint(0, 3) for _ in range(pick.randint(1, 6))])])
        elif kind == 8 and self.open:
            marked = pick.choice(self.open)
            self.open.append(marked.copy(marked.seq.fork()))
        elif kind == 9 and self.open and "window" not in self.options:
            marked = pick.choice(self.open)
            length = pick.randint(0, marked.seq.length)
            marked.seq.truncate(length)
            marked.cut(length)
        elif kind == 10:
            cache.evict(pick.randint(0, max(cache.num_free_blocks, 0)))
        elif kind in (11, 12) and self.open:
            marked = self.open.pop(pick.randrange(len(self.open)))
            self.open.append(marked)
            marked.seq.offload()
            self.open.remove(marked)
            self.offloaded.append(marked)
        elif kind == 13 and self.offloaded:
            marked = self.offloaded[pick.randrange(len(self.offloaded))]
            marked.seq.restore()
            self.offloaded.remove(marked)
            self.open.append(marked)
        elif kind == 14 and self.offloaded and pick.random() < 0.5:
            self.offloaded.pop().seq.close()
        elif kind == 15:
            chance = pick.random()
            if chance < 0.3:
                cache.invalidate(pick.randint(0, 2))
            elif chance < 0.5:
                cache.flush_tiers()
            elif chance < 0.7:
                cache.set_quota(1, pick.choice([0, 3, 6]))
            elif chance < 0.8 and not self.open and not self.offloaded:
                cache.reset()
            elif chance < 0.9 and "disk_tier" in self.options:
                cache.close()
                if pick.random() < 0.3 and os.path.getsize(self.path) > 4096:  # somebody damages the file
                    with open(self.path, "r+b") as file:
                        file.seek(pick.randrange(4096, os.path.getsize(self.path)))
                        file.write(bytes([pick.randrange(256)]))
                self.make()

    def run(self):
        for _ in range(NUM_CALLS):
            try:
                self.call()
            except (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError):
                # A step that does not fit has opened its sequence: it holds what it hit.
                self.open = [marked for marked in self.open if len(marked.tokens) == marked.seq.length]
            self.world.check(self.open)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_hits_are_what_they_ought_to_be(seed, tmp_path):
    walk = Walk(seed, tmp_path / "blocks")
    walk.run()
    stats = walk.world.cache.stats()
    assert stats["host_tier_resident"] <= stats["host_tier_blocks"]
