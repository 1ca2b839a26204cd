"""Random calls of a cache beside the model: after each one the audit passes and everything that can be seen agrees.

Pools, blocks and alphabets are tiny, so that shortage, hits, duplicates, copies and evictions happen all the time. K
and V are written too, as a number for each token, so a wrong copy or a block shared by mistake shows. A failure prints
its seed and the last calls; PAGEDKV_FUZZ_SEEDS runs that many seeds, from PAGEDKV_FUZZ_START on.
"""
import os

import numpy as np
import pytest

import pagedkv
from conformance import arrays

from .manager_model import ManagerModel, Refused

NUM_CALLS = 300
START = int(os.environ.get("PAGEDKV_FUZZ_START", "0"))
SEEDS = range(START, START + int(os.environ.get("PAGEDKV_FUZZ_SEEDS", "40")))

ERRORS = {"invalid": pagedkv.InvalidArgumentError, "busy": pagedkv.BusyError, "shortage": pagedkv.OutOfBlocksError,
          "never": pagedkv.NeverFitsError}

WEIGHTS = {"open": 12, "append": 10, "prepare": 22, "fork": 11, "truncate": 8, "commit": 5, "discard": 6, "reserve": 2,
           "rematch": 3, "ahead": 6, "evict": 1, "close": 8, "reset": 0.5, "victims": 2, "retain": 2, "touch": 2}
EVICTIONS = ["lru", "fifo", "priority", "lfu", "slru", "s3fifo"]


class Driver:
    """Chooses calls and makes them on both sides. pairs: (library's sequence, model's sequence)."""

    def __init__(self, device, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.block_size, self.num_blocks = int(rng.integers(1, 5)), int(rng.integers(2, 13))
        prefix_caching = bool(rng.random() < 0.9)
        layout = dict(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=self.block_size)
        self.format, self.arrays = arrays.BlockFormat(**layout), arrays.for_device(device)
        eviction = EVICTIONS[seed % len(EVICTIONS)]
        self.cache = pagedkv.Cache(pagedkv.Layout(**layout), num_blocks=self.num_blocks, device=device,
                                   prefix_caching=prefix_caching, eviction=eviction, hash_seed=seed + 1)
        self.batch = self.cache.batch(max_sequences=16, max_tokens=256)
        self.stepper = self.cache.batch(max_sequences=8, max_tokens=8, max_sequence_length=80)
        self.model = ManagerModel(self.num_blocks, self.block_size, prefix_caching, eviction)
        self.most_sequences = int(rng.integers(2, 8))
        self.alphabet = [65, 2**32 + 65, 321][: int(rng.integers(2, 4))]
        self.pairs, self.log, self.step, self.wants_discard, self.next_tag = [], [], None, False, 1
        self.log.append(f"Cache(num_blocks={self.num_blocks}, prefix_caching={prefix_caching}, eviction={eviction}), "
                        f"{layout}")

    # -- choices -------------------------------------------------------------------------------------------------

    def number(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def tokens(self, most):
        """Mostly one token, so that histories meet again."""
        return [self.alphabet[0 if self.rng.random() < 0.75 else self.number(0, len(self.alphabet) - 1)]
                for _ in range(self.number(0, most))]

    def new_tokens(self):
        """To append: usually few, sometimes some of them unknown."""
        tokens = self.tokens(3 * self.block_size if self.rng.random() < 0.2 else self.block_size + 1)
        if self.rng.random() < 0.15:
            tokens = [token if self.rng.random() < 0.5 else None for token in tokens]
        return tokens

    def pair(self):
        return self.pairs[self.number(0, len(self.pairs) - 1)]

    def name(self, pair):
        return f"s{pair[0].tag}"

    # -- one call on both sides ----------------------------------------------------------------------------------

    def both(self, text, call, model_call):
        """Returns (the library's result, the model's), or None where both refuse for the same reason."""
        self.log.append(text)
        try:
            expected = model_call()
        except Refused as refusal:
            before = self.cache.stats()
            with pytest.raises(ERRORS[refusal.kind]) as record:
                call()
            after = self.cache.stats()
            assert {**after, "refusals": 0} == {**before, "refusals": 0}
            if refusal.needed is not None:
                assert (record.value.needed, record.value.available) == (refusal.needed, refusal.available)
            self.log[-1] += "  # refused"
            return None
        return call(), expected

    def run(self):
        name = self.rng.choice(list(WEIGHTS), p=np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values()))
        if self.wants_discard:
            name, self.wants_discard = "discard", False
        if not self.pairs and name not in ("evict", "reset", "touch"):
            name = "open"
        if len(self.pairs) > self.most_sequences and name in ("open", "fork"):
            name = "close"
        if self.pairs and self.model.num_available() == 0 and self.rng.random() < 0.5:
            name = "truncate" if self.rng.random() < 0.3 else "close"  # or most calls would be refused
        getattr(self, "run_" + str(name))()
        self.compare()

    def run_open(self):
        tokens, namespace, priority = self.tokens(4 * self.block_size + 1), self.number(0, 8) // 8, self.number(-1, 1)
        tag = self.next_tag
        self.next_tag += 1
        result = self.both(f"s{tag} = cache.open({tokens}, namespace={namespace}, priority={priority}, tag={tag})",
                           lambda: self.cache.open(np.array(tokens, np.int64), namespace=namespace, priority=priority,
                                                   tag=tag),
                           lambda: self.model.open(tokens, namespace, priority))
        self.pairs.append(result)
        if self.rng.random() < 0.6:
            rest = tokens[result[0].length:]
            self.make_step([(result, rest)], True, "append")

    def run_append(self):
        self.make_step([(self.pair(), self.new_tokens())], True, "append")

    def run_prepare(self):
        chosen = self.rng.permutation(len(self.pairs))[: self.number(0, 4)]
        self.make_step([(self.pairs[i], self.new_tokens()) for i in chosen], bool(self.rng.random() < 0.75), "prepare")

    def run_ahead(self):
        """Steps ahead, some of them made by the device while something else is called, and settled."""
        chosen = self.rng.permutation(len(self.pairs))[: self.number(1, 4)]
        work = [(self.pairs[i], self.new_tokens()[:1] or [self.alphabet[0]]) for i in chosen]
        registers, ahead = bool(self.rng.random() < 0.8), self.number(1, 8)
        step = self.make_step(work, registers, "ahead", ahead)
        if step is None:
            return
        if self.rng.random() < 0.2:
            self.both("cache.discard(stepper)", lambda: self.cache.discard(self.stepper), lambda: self.model.discard(step))
            return
        self.compare()
        if self.rng.random() < 0.4 and len(self.pairs) <= self.most_sequences:
            self.run_fork()
            self.compare()
        if self.rng.random() < 0.2:
            self.run_append()
            self.compare()
        counts = [self.number(0, ahead) for _ in work]
        for i in range(ahead):
            self.stepper.advance(self.arrays.put(np.array([i < count for count in counts])))
        assert self.stepper.get_advanced()[0].tolist() == counts
        tokens = [[self.alphabet[0] if self.rng.random() < 0.8 else None for _ in range(count)] for count in counts]
        if any(pair[1].changed != step["serial"] for pair, _ in work) and self.rng.random() < 0.7:
            tokens = [own if pair[1].changed == step["serial"] else [] for (pair, _), own in zip(work, tokens)]
        flat = np.array([-1 if token is None else token for own in tokens for token in own], np.int64)
        counts = [len(own) for own in tokens]
        if self.both(f"stepper.settle({counts}, tokens={flat.tolist()})",
                     lambda: self.stepper.settle(counts, tokens=flat),
                     lambda: self.model.settle_steps(step, tokens, registers)):
            self.write_rows([(pair, own) for (pair, _), own in zip(work, tokens)])

    def make_step(self, work, registers, way, ahead=0):
        flat = np.array([-1 if token is None else token for _, tokens in work for token in tokens], np.int64)
        sequences, counts = [pair[0] for pair, _ in work], [len(tokens) for _, tokens in work]
        names = ", ".join(self.name(pair) for pair, _ in work)
        if way == "append":
            text, call = f"{names}.append({flat.tolist()})", lambda: sequences[0].append(flat)
        elif way == "ahead":
            text = f"stepper.prepare([{names}], {counts}, tokens={flat.tolist()}, register={registers}, " \
                   f"steps_ahead={ahead})"
            call = lambda: self.stepper.prepare(sequences, counts, tokens=flat, register=registers,  # noqa: E731
                                                steps_ahead=ahead)
        else:
            text = f"batch.prepare([{names}], {counts}, tokens={flat.tolist()}, register={registers})"
            call = lambda: self.batch.prepare(sequences, counts, tokens=flat, register=registers)  # noqa: E731
        model_work = [(pair[1], tokens) for pair, tokens in work]
        result = self.both(text, call, lambda: self.model.prepare(model_work, registers, ahead))
        if result is None:
            return None
        if way == "prepare":
            self.step = result[1]
            self.wants_discard = bool(self.rng.random() < 0.15)
        self.write_rows(work)
        return result[1]

    def write_rows(self, work):
        """Of the newest tokens of each sequence."""
        memory = self.arrays.read_blocks(self.cache)
        for plane in self.format.planes(memory, 0):
            for pair, tokens in work:
                table = pair[0].blocks
                for position in range(pair[1].length - len(tokens), pair[1].length):
                    plane[table[position // self.block_size], position % self.block_size] = \
                        self.model.row(pair[1], position).value
        self.arrays.write_blocks(self.cache, memory)

    def run_discard(self):
        """Of the last step that the batch prepared, right after it or after other calls."""
        step = self.step
        if step is None or not all(part.seq in self.model.sequences for part in step["parts"]):
            return self.run_prepare()
        self.both("cache.discard(batch)", lambda: self.cache.discard(self.batch), lambda: self.model.discard(step))

    def run_fork(self):
        pair = self.pair()
        length = None if self.rng.random() < 0.6 else self.number(0, pair[1].length + 1)
        result = self.both(f"{self.name(pair)}.fork({length})",
                           lambda: pair[0].fork() if length is None else pair[0].fork(length=length),
                           lambda: self.model.fork(pair[1], length))
        if result:
            self.pairs.append(result)

    def run_truncate(self):
        pair = self.pair()
        length = self.number(0, pair[1].length + (self.rng.random() < 0.1))
        self.both(f"{self.name(pair)}.truncate({length})", lambda: pair[0].truncate(length),
                  lambda: self.model.truncate(pair[1], length))

    def run_commit(self):
        pair = self.pair()
        seq = pair[1]
        rows = [self.model.row(seq, i) for i in range(seq.settled, seq.length)][: self.number(0, 6)]
        tokens = [self.alphabet[0] if row.token is None else row.token for row in rows]
        if self.rng.random() < 0.1:
            tokens += self.tokens(2)
        if tokens and self.rng.random() < 0.05:
            tokens[-1] = self.alphabet[1]
        self.both(f"{self.name(pair)}.commit({tokens})", lambda: pair[0].commit(np.array(tokens, np.int64)),
                  lambda: self.model.commit(seq, tokens))

    def run_reserve(self):
        pair, count = self.pair(), self.number(0, 3 * self.block_size)
        self.both(f"{self.name(pair)}.reserve({count})", lambda: pair[0].reserve(count),
                  lambda: self.model.reserve(pair[1], count))

    def run_rematch(self):
        fresh = [pair for pair in self.pairs if not pair[1].has_appended]
        pair = fresh[self.number(0, len(fresh) - 1)] if fresh and self.rng.random() < 0.9 else self.pair()
        own = [self.model.row(pair[1], i).token for i in range(pair[1].length)]
        own = [self.alphabet[0] if token is None else token for token in own]
        tokens = (own if self.rng.random() < 0.9 else self.tokens(4)) + self.tokens(2 * self.block_size + 1)
        self.both(f"{self.name(pair)}.rematch({tokens})", lambda: pair[0].rematch(np.array(tokens, np.int64)),
                  lambda: self.model.rematch(pair[1], tokens))

    def run_evict(self):
        count = self.number(0, self.num_blocks)
        result = self.both(f"cache.evict({count})", lambda: self.cache.evict(count), lambda: self.model.evict(count))
        if result:
            assert result[0] == result[1]

    def run_retain(self):
        pair, priority = self.pair(), self.number(-1, 2)
        start = self.number(0, pair[1].length)
        end = self.number(start, pair[1].length + (self.rng.random() < 0.1))
        self.both(f"{self.name(pair)}.retain({start}, {end}, priority={priority})",
                  lambda: pair[0].retain(start, end, priority=priority),
                  lambda: self.model.retain(pair[1], start, end, priority))

    def run_touch(self):
        tokens, namespace = self.tokens(4 * self.block_size), self.number(0, 8) // 8
        result = self.both(f"cache.touch({tokens}, namespace={namespace})",
                           lambda: self.cache.touch(np.array(tokens, np.int64), namespace=namespace),
                           lambda: self.model.touch(tokens, namespace))
        assert result[0] == result[1]

    def run_close(self):
        pair = self.pair()
        self.both(f"{self.name(pair)}.close()", pair[0].close, lambda: self.model.close(pair[1]))
        self.pairs.remove(pair)

    def run_reset(self):
        self.both("cache.reset()", self.cache.reset, self.model.reset)

    def run_victims(self):
        count = self.number(0, self.num_blocks)
        result = self.both(f"cache.victims({count})", lambda: self.cache.victims(count),
                           lambda: self.model.victims(count))
        if result:
            by_model = {id(pair[1]): pair[0] for pair in self.pairs}
            assert list(result[0]) == [by_model[id(seq)] for seq in result[1]]

    # -- what can be seen ----------------------------------------------------------------------------------------

    def compare(self):
        self.cache.check()
        model, stats = self.model, self.cache.stats()
        held = model.held()
        assert self.cache.num_free_blocks == self.num_blocks - len(held)
        assert self.cache.num_cached_blocks == len(model.cached)
        expected = {"uncached_blocks": model.num_uncached(), "cached_blocks": len(model.cached),
                    "held_blocks": len(held), "pending_blocks": 0, "num_sequences": len(self.pairs),
                    "evictions": model.evictions, "copies": model.copies, "hit_tokens": model.hit_tokens,
                    "queried_tokens": model.queried_tokens, "appended_tokens": model.appended_tokens}
        assert {key: stats[key] for key in expected} == expected
        memory = self.arrays.read_blocks(self.cache)
        keys, values = self.format.planes(memory, 0)
        seen = set()
        for seq, twin in self.pairs:
            table = seq.blocks.tolist()
            seen.update(table)
            assert (seq.length, seq.num_cached_tokens, len(table)) == (twin.length, twin.num_cached, len(twin.table))
            for block, model_block in zip(table, twin.table[: model.count_blocks(twin.length)]):
                if model_block.id is None:
                    model_block.id = block
                assert model_block.id == block
            expected_values = [model.row(twin, i).value for i in range(twin.length)]
            for plane in (keys, values):
                rows = plane[table].reshape(-1, 8)[: twin.length] if table else np.zeros((0, 8))
                assert (rows == np.array(expected_values, np.float32)[:, None]).all()
        assert len(seen) == len(held)  # what the model shares is shared, and nothing else
        live = [block.id for block in list(held.values()) + model.cached if block.id is not None]
        assert len(set(live)) == len(live)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(device, seed):
    driver = Driver(device, seed)
    try:
        for _ in range(NUM_CALLS):
            driver.run()
    except BaseException:
        print(f"seed {seed}; the last calls:", *driver.log[:1], *driver.log[-40:], sep="\n  ")
        raise
    while driver.pairs:
        driver.run_close()
        driver.compare()
    assert driver.cache.num_free_blocks == driver.num_blocks
