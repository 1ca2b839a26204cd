"""Random sequences of every call on sequences, in small pools, against what the rows of K and V must be."""
import numpy as np
import pytest

import pagedkv

from .caches import ids
from .marked import MarkedCache, turn


POLICIES = ("lru", "lfu", "priority", "fifo", "slru", "s3fifo")


class Driver:
    def __init__(self, device, seed, **options):
        self.rng = np.random.default_rng(seed)
        self.cache = MarkedCache(device, int(self.rng.integers(8, 40)), block_size=int(self.rng.integers(1, 6)),
                                 max_tokens=64, rope=pagedkv.Rope(), formats=("table", "csr"),
                                 eviction=str(self.rng.choice(POLICIES)), **options)
        self.items, self.shifted = [], set()
        self.num_done = dict.fromkeys(self.CALLS, 0)
        self.num_refused = 0

    def prompt(self):
        """Of few kinds, so that prompts share; they part anywhere."""
        length, cut = self.draw(30), self.draw(40)
        return [i if i < cut else i + 100 * self.draw(2) for i in range(length)]

    def goes_on(self, marked):
        """Tokens to append: mostly those that prompts have there."""
        count, length = self.draw(9), marked.seq.length
        return [length + i + 100 * int(self.rng.random() < 0.1) for i in range(count)]

    def choose(self, most=4):
        count = int(self.rng.integers(0, min(most, len(self.items)) + 1))
        return [self.items[int(i)] for i in self.rng.permutation(len(self.items))[:count]]

    def draw(self, end):
        return int(self.rng.integers(end + 1))

    def call_open(self):
        prompts = [self.prompt() for _ in range(self.draw(3))]
        numbers = self.rng.integers(0, 5, (3, len(prompts))) // 4  # mostly 0, so that prompts share
        salts = [[(3, 7)] if salt else None for salt in numbers[0]]
        for seq, prompt in zip(self.cache.cache.open_many(prompts, numbers[1], numbers[2], salts=salts), prompts):
            self.items.append(self.cache.adopt(seq, prompt))

    def call_fork(self):
        parents = self.choose() * 2
        lengths = [self.draw(marked.seq.length) for marked in parents]
        for marked, seq, length in zip(parents, self.cache.cache.fork_many([m.seq for m in parents], lengths), lengths):
            self.items.append(marked.copy(seq, length))

    def call_step(self):
        work = [(marked, self.goes_on(marked)) for marked in self.choose()]
        self.cache.step(work, known=self.rng.random() < 0.7, register=self.rng.random() < 0.7)

    def call_discard(self):
        chosen = self.choose()
        counts = [self.draw(9) for _ in chosen]
        self.cache.batch.prepare([marked.seq for marked in chosen], counts,
                                 tokens=ids(self.rng.integers(0, 3, sum(counts))))
        self.cache.cache.discard(self.cache.batch)

    def call_commit(self):
        chosen = self.choose()
        names = []
        for marked in chosen:
            settled = marked.seq.settled_length
            names.append(marked.tokens[settled:settled + self.draw(marked.seq.length - settled)])
        self.cache.cache.commit_many([marked.seq for marked in chosen], names)

    def call_truncate(self):
        chosen = self.choose()
        lengths = [max(marked.seq.length - self.draw(6), 0) for marked in chosen]
        self.cache.cache.truncate_many([marked.seq for marked in chosen], lengths)
        for marked, length in zip(chosen, lengths):
            marked.cut(length)

    def call_reserve(self):
        for marked in self.choose(1):
            marked.seq.reserve(self.draw(10))

    def call_close(self):
        chosen = self.choose(3)
        self.cache.cache.close_many([marked.seq for marked in chosen])
        self.items = [marked for marked in self.items if marked not in chosen]

    def call_reorder(self):
        chosen = self.choose()
        sources = [self.draw(len(chosen) - 1) for _ in chosen]
        self.cache.cache.reorder([marked.seq for marked in chosen], sources)
        new = [chosen[source].copy(marked.seq) for marked, source in zip(chosen, sources)]
        for marked, other in zip(chosen, new):
            marked.tokens, marked.k, marked.v = other.tokens, other.k, other.v

    def call_accept(self):
        """Of a chain any ascending places: their rows no longer follow from the tokens, so they must not be hit. They are
        appended without names, and the call is followed by a truncate or by names that no prompt has."""
        chosen = self.choose()
        work = [(marked, (1000 + self.rng.integers(0, 10**6, self.draw(7))).tolist()) for marked in chosen]
        self.cache.step(work, register=False, paths=[[[token] for token in tokens] for _, tokens in work])
        kept = []
        for _, tokens in work:
            places = self.rng.permutation(len(tokens))[:self.draw(len(tokens))] if tokens else []
            kept.append(sorted(int(place) for place in places))
        counts = [len(tokens) for _, tokens in work]
        try:
            self.cache.cache.accept([marked.seq for marked in chosen], counts, kept)
        except pagedkv.OutOfBlocksError:
            kept = [list(range(count)) for count in counts]  # all stay
        for marked, count, places in zip(chosen, counts, kept):
            base = len(marked.tokens) - count
            for rows in (marked.tokens, marked.k, marked.v):
                rows[base:] = [rows[base + place] for place in places]

    def call_shift(self):
        for marked in self.choose(1):
            start = self.draw(marked.seq.length)
            count = self.draw(marked.seq.length - start)
            marked.seq.shift(start, count)
            for rows in (marked.tokens, marked.k, marked.v):
                del rows[start:start + count]
            marked.k[start:] = [turn(k, -count).astype(np.float32) for k in marked.k[start:]]

    def call_rematch(self):
        for marked in self.choose(1):
            prompt = marked.tokens + self.prompt()
            marked.seq.rematch(ids(prompt))
            fresh = self.cache.adopt(marked.seq, prompt)
            marked.tokens, marked.k, marked.v = fresh.tokens, fresh.k, fresh.v

    def call_quota(self):
        self.cache.cache.set_quota(self.draw(1), int(self.rng.choice([0, self.draw(20)])))

    def call_invalidate(self):
        self.cache.cache.invalidate(int(self.rng.choice([0, 1, 7, 8, 9])))

    def call_retain(self):
        for marked in self.choose(1):
            marked.seq.retain(0, None, self.draw(3))

    def call_evict(self):
        self.cache.cache.evict(self.draw(3))

    CALLS = ("open", "fork", "step", "step", "step", "discard", "commit", "truncate", "reserve", "close", "reorder",
             "accept", "shift", "rematch", "evict", "quota", "invalidate", "retain")

    def run(self, num_calls):
        for _ in range(num_calls):
            name = self.CALLS[int(self.rng.integers(len(self.CALLS)))]
            if len(self.items) > 10:
                name = "close"
            try:
                getattr(self, f"call_{name}")()
                self.num_done[name] += 1
            except (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError, pagedkv.InvalidArgumentError):
                self.num_refused += 1
            self.cache.check(self.items, atol=1e-4)
        self.cache.cache.close_many([marked.seq for marked in self.items])
        assert self.cache.cache.num_free_blocks == self.cache.cache.num_blocks
        self.cache.cache.check()


@pytest.mark.parametrize("options", [{}, {"partial_reuse": True}, {"window": 7}, {"window": 5, "sinks": 6},
                                     {"window": 9, "sinks": 3, "partial_reuse": True}, {"prefix_caching": False}],
                         ids=["plain", "partial", "window", "sinks", "all", "uncached"])
@pytest.mark.parametrize("seed", range(8))
def test_random_calls(device, seed, options):
    driver = Driver(device, seed, **options)
    driver.run(150)
    assert sum(driver.num_done.values()) > driver.num_refused
