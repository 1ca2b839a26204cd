"""A state machine of hypothesis over the Python API: every call, every policy, tiny pools, the audit after each rule.

Where the fuzz target compares stored rows, this one looks at what Python sees: lengths, tables, counts, errors, and
that a block stands in two tables only where the histories agree. A failure is shrunk to the shortest program of calls.
PAGEDKV_FUZZ_SECONDS is the time for all policies together; a failure prints the seed that PAGEDKV_FUZZ_START repeats.
"""
import io
import os
import time

import numpy as np
import pytest

import pagedkv

hypothesis = pytest.importorskip("hypothesis", reason="no hypothesis: pip install 'pagedkv[test]'")
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,  # noqa: E402
                                 run_state_machine_as_test)

EVICTIONS = ["lru", "lfu", "priority", "fifo", "slru", "s3fifo"]
SECONDS = float(os.environ.get("PAGEDKV_FUZZ_SECONDS", "18"))
START = int(os.environ.get("PAGEDKV_FUZZ_START", "0"))
REFUSALS = (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError)

TOKENS = st.lists(st.sampled_from([7, 7, 7, 2**32 + 7]), max_size=12)
NAMESPACES = st.integers(0, 2)
SALTS = st.one_of(st.none(), st.none(), st.lists(st.tuples(st.integers(1, 9), NAMESPACES), max_size=2,
                                                 unique_by=lambda salt: salt[0]).map(sorted))


class Item:
    """A sequence and its tokens; of those from num_exact on nothing can be hit."""

    def __init__(self, seq, scopes, tokens):
        self.seq, self.scopes, self.tokens, self.num_exact = seq, scopes, list(tokens), None

    def copy(self, seq, length):
        other = Item(seq, self.scopes, self.tokens)
        other.num_exact = self.num_exact
        other.cut(length)
        return other

    def cut(self, length):
        del self.tokens[length:]
        if self.num_exact is not None and length <= self.num_exact:
            self.num_exact = None

    def drop(self, start, count):
        del self.tokens[start:start + count]
        if start == len(self.tokens):
            self.cut(start)
        elif count > 0:
            self.num_exact = start if self.num_exact is None else min(start, self.num_exact)


class Machine(RuleBasedStateMachine):
    eviction = "lru"

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), window=st.sampled_from([None, None, 3, 6]),
                partial_reuse=st.booleans(), low_water=st.integers(0, 3), prefix_caching=st.sampled_from([True] * 5 + [False]))
    def make(self, num_blocks, block_size, window, partial_reuse, low_water, prefix_caching):
        layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=block_size)
        self.layout, self.block_size, self.window = layout, block_size, window
        self.low_water, self.partial_reuse = low_water, partial_reuse
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device="host", eviction=self.eviction, window=window,
                                   sinks=2 if window else 0, partial_reuse=partial_reuse, rope=pagedkv.Rope(),
                                   prefix_caching=prefix_caching, low_water=low_water, event_capacity=1000, hash_seed=1,
                                   max_num_blocks=num_blocks + 6)
        self.batch = self.cache.batch(max_sequences=8, max_tokens=96, formats=("table", "csr"))
        self.stepper = self.cache.batch(max_sequences=8, max_tokens=8, max_sequence_length=160)
        self.stepping = None  # steps ahead: the items, how many steps, and the blocks that they must still have
        self.items, self.pins, self.prompts = [], [], [[]]
        self.transfers = []  # (transfer, scopes of what is received)
        self.snapshot = self.prepared = None
        self.findable = {}  # hash -> block, from the events

    # -- choices, and calls that may be refused --------------------------------------------------------------------

    def one(self, data):
        return data.draw(st.sampled_from(self.items))

    def some(self, data, most=4):
        return data.draw(st.lists(st.sampled_from(self.items), max_size=most, unique_by=id)) if self.items else []

    def prompt(self, data, tokens):
        """Often one that was there before, and some more."""
        return data.draw(st.sampled_from(self.prompts)) + tokens

    def attempt(self, call, *refusals):
        """The result, or None where the call is refused: then nothing may have changed."""
        before = {**self.cache.stats(), "refusals": 0}
        try:
            return call() or True
        except refusals or REFUSALS as error:
            assert {**self.cache.stats(), "refusals": 0} == before
            if isinstance(error, REFUSALS):
                assert error.needed > error.available
            return None

    def cut_refusals(self, items):
        """What the window has given back cannot be cut back to."""
        return (pagedkv.InvalidArgumentError,) if self.window else (NeverRaised,)

    # -- one sequence ----------------------------------------------------------------------------------------------

    def adopt(self, seq, scopes, prompt):
        assert seq.length == seq.num_cached_tokens <= max(len(prompt) - 1, 0)
        assert self.partial_reuse or seq.length % self.block_size == 0
        self.items.append(Item(seq, scopes, prompt[:seq.length]))

    @precondition(lambda self: len(self.items) < 8)
    @rule(data=st.data(), tokens=TOKENS, namespace=NAMESPACES, salts=SALTS, priority=st.integers(-1, 1))
    def open(self, data, tokens, namespace, salts, priority):
        prompt = self.prompt(data, tokens)
        probed = self.cache.probe(prompt, namespace=namespace, salts=salts)
        seq = self.cache.open(prompt, namespace=namespace, salts=salts, priority=priority)
        assert seq.length == probed
        self.adopt(seq, (namespace, tuple(salts or ())), prompt)
        self.prompts = self.prompts[-4:] + [prompt[:40]]
        if self.attempt(lambda: seq.append(prompt[seq.length:])):
            self.items[-1].tokens = list(prompt)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), tokens=TOKENS, is_known=st.booleans())
    def append(self, data, tokens, is_known):
        item = self.one(data)
        if self.attempt(lambda: item.seq.append(tokens if is_known else [-1] * len(tokens))):
            item.tokens += tokens

    @precondition(lambda self: self.items)
    @rule(data=st.data(), tokens=TOKENS)
    def rematch(self, data, tokens):
        item = self.one(data)
        prompt = item.tokens + tokens
        if self.attempt(lambda: item.seq.rematch(prompt), pagedkv.InvalidArgumentError):
            item.tokens = prompt[:item.seq.length]

    @precondition(lambda self: self.items)
    @rule(data=st.data(), count=st.integers(0, 12))
    def reserve(self, data, count):
        item = self.one(data)
        self.attempt(lambda: item.seq.reserve(count))

    @precondition(lambda self: self.items)
    @rule(data=st.data(), count=st.integers(1, 6))
    def shift(self, data, count):
        item = self.one(data)
        start = data.draw(st.integers(0, len(item.tokens)))
        count = min(count, len(item.tokens) - start)
        if self.attempt(lambda: item.seq.shift(start, count), *REFUSALS, *self.cut_refusals([item])):
            item.drop(start, count)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), priority=st.integers(-1, 2), ttl=st.sampled_from([None, 1e6]))
    def retain(self, data, priority, ttl):
        item = self.one(data)
        start = data.draw(st.integers(0, len(item.tokens)))
        item.seq.retain(start, None, priority=priority, ttl=ttl)
        with pytest.raises(pagedkv.InvalidArgumentError):
            item.seq.retain(0, len(item.tokens) + 1)

    # -- many sequences --------------------------------------------------------------------------------------------

    @rule(data=st.data(), registers=st.booleans(), fails=st.booleans())
    def step(self, data, registers, fails):
        items = self.some(data)
        work = [data.draw(TOKENS) for _ in items]
        flat = [token for tokens in work for token in tokens]
        if not self.attempt(lambda: self.batch.prepare([item.seq for item in items], [len(tokens) for tokens in work],
                                                       tokens=flat, register=registers)):
            return
        assert self.batch.seq_lens.tolist() == [len(item.tokens) + len(tokens) for item, tokens in zip(items, work)]
        if fails:
            self.cache.discard(self.batch)
            return
        for item, tokens in zip(items, work):
            item.tokens += tokens

    @precondition(lambda self: self.items)
    @rule(data=st.data(), ahead=st.integers(1, 8), registers=st.booleans(), fails=st.integers(0, 5))
    def prepare_ahead(self, data, ahead, registers, fails):
        items = self.some(data)
        tokens = [data.draw(st.sampled_from([7, 2**32 + 7])) for _ in items]
        if not self.attempt(lambda: self.stepper.prepare([item.seq for item in items], [1] * len(items), tokens=tokens,
                                                         register=registers, steps_ahead=ahead)):
            return
        if fails == 0:
            self.cache.discard(self.stepper)
            self.stepping = None
            return
        for item, token in zip(items, tokens):
            item.tokens.append(token)
        self.stepping = (items, ahead, [item.seq.blocks.tolist() for item in items], [0] * len(items))

    @precondition(lambda self: self.stepping)
    @rule(data=st.data())
    def advance(self, data):
        items, ahead, blocks, counts = self.stepping
        is_active = [item in self.items and item.seq.blocks.tolist() == own and bool(data.draw(st.booleans()))
                     for item, own in zip(items, blocks)]
        before = self.stepper.seq_lens.tolist()
        self.stepper.advance(np.array(is_active, np.bool_))
        for i, wants_more in enumerate(is_active):
            has_more = wants_more and counts[i] < ahead
            counts[i] += has_more
            slot = -1
            if has_more:
                slot = blocks[i][before[i] // self.block_size] * self.block_size + before[i] % self.block_size
            assert self.stepper.slot_mapping[i] == slot and self.stepper.seq_lens[i] == before[i] + has_more
        assert self.stepper.get_advanced()[0].tolist() == counts

    @precondition(lambda self: self.stepping)
    @rule(data=st.data(), is_known=st.booleans())
    def settle(self, data, is_known):
        items, _, blocks, counts = self.stepping
        counts = [count if item in self.items and item.seq.blocks.tolist() == own else 0
                  for item, own, count in zip(items, blocks, counts)]
        work = [[data.draw(st.sampled_from([7, 2**32 + 7])) for _ in range(count)] for count in counts]
        flat = [token for tokens in work for token in tokens] if is_known else None
        # A sequence that has changed and come back is refused.
        if not self.attempt(lambda: self.stepper.settle(counts, tokens=flat), pagedkv.InvalidArgumentError):
            assert any(counts)
            self.stepper.settle([0] * len(items))
            work = [[] for _ in items]
        self.stepping = None
        for item, tokens in zip(items, work):
            item.tokens += tokens

    @precondition(lambda self: len(self.items) < 6)
    @rule(data=st.data(), namespace=NAMESPACES)
    def open_many(self, data, namespace):
        prompts = [self.prompt(data, data.draw(TOKENS)) for _ in range(2)]
        probed = [self.cache.probe(prompt, namespace=namespace) for prompt in prompts]
        sequences = self.cache.open_many(prompts, namespace=namespace)
        assert [seq.length for seq in sequences] == probed
        for seq, prompt in zip(sequences, prompts):
            self.adopt(seq, (namespace, ()), prompt)

    @precondition(lambda self: self.items and len(self.items) < 6)
    @rule(data=st.data())
    def fork_many(self, data):
        parents = [self.one(data) for _ in range(2)]
        lengths = [data.draw(st.integers(0, len(parent.tokens))) for parent in parents]
        children = self.attempt(lambda: self.cache.fork_many([parent.seq for parent in parents], lengths),
                                *self.cut_refusals(parents))
        for parent, seq, length in zip(parents, children or [], lengths):
            self.items.append(parent.copy(seq, length))

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def commit_many(self, data):
        items = self.some(data)
        names = []
        for item in items:
            settled = item.seq.settled_length
            names.append(item.tokens[settled:data.draw(st.integers(settled, len(item.tokens)))])
        self.cache.commit_many([item.seq for item in items], names)
        for item, tokens in zip(items, names):
            with pytest.raises(pagedkv.InvalidArgumentError):
                self.cache.commit_many([item.seq], [[0] * (len(item.tokens) + 1)])

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def truncate_many(self, data):
        items = self.some(data)
        lengths = [data.draw(st.integers(0, len(item.tokens))) for item in items]
        if self.attempt(lambda: self.cache.truncate_many([item.seq for item in items], lengths), *self.cut_refusals(items)):
            for item, length in zip(items, lengths):
                item.cut(length)

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def reorder(self, data):
        items = self.some(data)
        sources = [data.draw(st.integers(0, len(items) - 1)) for _ in items]
        self.cache.reorder([item.seq for item in items], sources)
        histories = [(item.scopes, list(item.tokens), item.num_exact) for item in items]
        for item, source in zip(items, sources):
            item.scopes, item.tokens, item.num_exact = histories[source][0], list(histories[source][1]), histories[source][2]

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def accept(self, data):
        items = self.some(data, 3)
        drafts = [data.draw(TOKENS) for _ in items]
        sequences, counts = [item.seq for item in items], [len(tokens) for tokens in drafts]
        # Names that no prompt has: of any places kept, the rows would not follow from the tokens.
        if not self.attempt(lambda: self.batch.prepare(sequences, counts, register=False)):
            return
        kept = [sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else [] for count in counts]
        refusals = (pagedkv.OutOfBlocksError, *self.cut_refusals(items))
        if self.attempt(lambda: self.cache.accept(sequences, counts, kept), *refusals):
            for item, tokens, places in zip(items, drafts, kept):
                item.tokens += [tokens[place] for place in places]
        else:
            self.cache.truncate_many(sequences, [len(item.tokens) for item in items])

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def close_many(self, data):
        items = self.some(data)
        self.cache.close_many([item.seq for item in items])
        self.items = [item for item in self.items if item not in items]
        for item in items:
            with pytest.raises(pagedkv.NotFoundError):
                item.seq.close()

    # -- prefixes, namespaces, eviction ----------------------------------------------------------------------------

    @rule(data=st.data(), tokens=TOKENS, namespace=NAMESPACES, salts=SALTS)
    def touch(self, data, tokens, namespace, salts):
        prompt = self.prompt(data, tokens)
        expected = self.cache.probe(prompt + [0], namespace=namespace, salts=salts)
        assert self.cache.touch(prompt, namespace=namespace, salts=salts) == expected - expected % self.block_size

    @rule(data=st.data(), tokens=TOKENS, namespace=NAMESPACES, ttl=st.sampled_from([None, 1e6]))
    def pin(self, data, tokens, namespace, ttl):
        prompt = self.prompt(data, tokens)
        if self.cache.probe(prompt + [0], namespace=namespace) < self.block_size:
            with pytest.raises(pagedkv.NotFoundError):
                self.cache.pin(prompt, namespace=namespace, ttl=ttl)
        elif len(self.pins) < 3:
            pin = self.cache.pin(prompt, namespace=namespace, ttl=ttl)
            self.pins.append((pin, prompt[:pin.num_tokens], namespace))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        entry = data.draw(st.sampled_from(self.pins))
        self.pins.remove(entry)
        entry[0].unpin()
        with pytest.raises(pagedkv.NotFoundError):
            entry[0].unpin()

    @rule(data=st.data(), namespace=NAMESPACES)
    def invalidate(self, data, namespace):
        self.cache.invalidate(namespace)
        self.pins = [entry for entry in self.pins if entry[2] != namespace]
        for prompt in self.prompts:
            assert self.cache.probe(prompt, namespace=namespace) == 0

    @rule(namespace=NAMESPACES, quota=st.one_of(st.just(0), st.integers(0, 12)))
    def set_quota(self, namespace, quota):
        self.cache.set_quota(namespace, quota)
        if quota:
            assert self.cache.namespace_stats(namespace)["quota"] == quota

    @rule(count=st.integers(0, 12))
    def evict(self, count):
        before = self.cache.stats()
        if self.attempt(lambda: [self.cache.evict(count)]):
            assert self.cache.stats()["uncached_blocks"] == max(count, before["uncached_blocks"])

    @rule()
    def evict_to_low_water(self):
        before = self.cache.stats()
        self.cache.evict()
        wanted = min(self.low_water, before["uncached_blocks"] + before["cached_blocks"])
        assert self.cache.stats()["uncached_blocks"] == max(wanted, before["uncached_blocks"])

    @rule(count=st.integers(0, 12))
    def preempt(self, count):
        before = self.cache.stats()
        victims = self.attempt(lambda: self.cache.victims(count), pagedkv.OutOfBlocksError, pagedkv.NeverFitsError)
        if isinstance(victims, list):
            self.cache.close_many(victims)
            self.items = [item for item in self.items if not any(item.seq is victim for victim in victims)]
            assert before["held_blocks"] - self.cache.stats()["held_blocks"] >= count

    @rule()
    def reset(self):
        if self.items or self.transfers:
            with pytest.raises(pagedkv.BusyError):
                self.cache.reset()
        else:
            self.cache.reset()
            self.pins = []
            assert self.cache.num_cached_blocks == 0

    @rule(num_blocks=st.integers(1, 22), move=st.booleans(), in_phases=st.booleans())
    def resize(self, num_blocks, move, in_phases):
        num_blocks = min(num_blocks, self.cache.max_num_blocks)
        if self.prepared is not None:
            with pytest.raises(pagedkv.BusyError):
                self.cache.resize(num_blocks)
            num_blocks, call = self.prepared.num_blocks, self.prepared.commit
        elif in_phases:
            self.prepared = self.cache.prepare_resize(num_blocks)
            return
        else:
            def call(**options):
                self.cache.resize(num_blocks, **options)
        before = self.cache.stats()
        if self.attempt(lambda: call(move=move), pagedkv.BusyError, pagedkv.OutOfBlocksError):
            after = self.cache.stats()
            assert self.cache.num_blocks == after["num_blocks"] == num_blocks
            assert all(after[key] == before[key] for key in ("held_blocks", "pending_blocks"))
            if move:
                owned = sum(before[key] for key in ("held_blocks", "pending_blocks", "cached_blocks"))
                assert after["evictions"] - before["evictions"] == max(owned - num_blocks, 0)
            if num_blocks < before["num_blocks"]:
                with pytest.raises(pagedkv.InvalidArgumentError):
                    self.cache.discard(self.batch)
                with pytest.raises(pagedkv.InvalidArgumentError):  # what was not settled by now is not
                    self.stepper.advance()
                self.stepping = None
        else:
            assert before["held_blocks"] + before["pending_blocks"] > num_blocks or not move or self.transfers
        self.end_resize()

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def end_resize(self):
        if self.prepared is not None:
            self.prepared.close()
        self.prepared = None

    # -- transfers -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.items and len(self.transfers) < 4)
    @rule(data=st.data())
    def send(self, data):
        item = self.one(data)
        start, end = (data.draw(st.integers(0, len(item.tokens))) for _ in "se")
        transfer = self.attempt(lambda: self.cache.send(item.seq, start, end), pagedkv.InvalidArgumentError)
        first, last = start // self.block_size, -(-end // self.block_size)
        table = item.seq.blocks.tolist()[first:last]
        assert (transfer is not None) == (start < end and -1 not in table)
        if transfer is not None:
            assert transfer.blocks.tolist() == table
            self.transfers.append((transfer, None))

    @precondition(lambda self: len(self.transfers) < 4)
    @rule(count=st.integers(1, 13), namespace=NAMESPACES, salts=SALTS)
    def receive(self, count, namespace, salts):
        pending = self.cache.stats()["pending_blocks"]
        transfer = self.attempt(lambda: self.cache.receive(count, namespace=namespace, salts=salts))
        if transfer is not None:
            self.transfers.append((transfer, (namespace, tuple(salts or ()))))
            assert self.cache.stats()["pending_blocks"] == pending + count

    @precondition(lambda self: self.transfers and len(self.items) < 8)
    @rule(data=st.data(), tokens=TOKENS)
    def commit_transfer(self, data, tokens):
        entry = data.draw(st.sampled_from(self.transfers))
        transfer, scopes = entry
        prompt = self.prompt(data, tokens)
        refusals = [pagedkv.InvalidArgumentError] if scopes is None or len(prompt) > len(transfer.blocks) * self.block_size else []
        if transfer.is_quarantined and scopes is not None:
            refusals = [pagedkv.BusyError]
        seq = self.attempt(lambda: transfer.commit(prompt), *refusals or (NeverRaised,))
        assert (seq is None) == bool(refusals)
        if seq is not None:
            self.transfers.remove(entry)
            self.items.append(Item(seq, scopes, prompt))
            assert seq.settled_length == len(prompt) and not transfer.is_open

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def quarantine(self, data):
        data.draw(st.sampled_from(self.transfers))[0].quarantine()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def finish_transfer(self, data):
        entry = data.draw(st.sampled_from(self.transfers))
        self.transfers.remove(entry)
        entry[0].finish()
        with pytest.raises(pagedkv.NotFoundError):
            entry[0].finish()

    # -- snapshots and reports -------------------------------------------------------------------------------------

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def save_sequence(self, data):
        item, file = self.one(data), io.BytesIO()
        if (item.seq.blocks < 0).any() or item.num_exact is not None:
            with pytest.raises(pagedkv.UnsupportedError):
                item.seq.save(file)
            return
        item.seq.save(file)
        self.snapshot = (file.getvalue(), item.copy(None, len(item.tokens)))

    @precondition(lambda self: self.snapshot is not None and len(self.items) < 8)
    @rule(place=st.integers(0, 10**6))
    def load_sequence(self, place):
        data, item = self.snapshot
        damaged = bytearray(data)
        damaged[place % len(data)] ^= 1 << place % 8
        assert self.attempt(lambda: self.cache.load_sequence(io.BytesIO(damaged)), pagedkv.InvalidArgumentError,
                            pagedkv.UnsupportedError) is None
        seq = self.attempt(lambda: self.cache.load_sequence(io.BytesIO(data)))
        if seq is not None:
            self.items.append(item.copy(seq, len(item.tokens)))

    @rule()
    def save_and_load_prefixes(self):
        file = io.BytesIO()
        self.cache.save(file)
        file.seek(0)
        try:
            assert self.cache.load(file) == 0  # all of it is here
        except (pagedkv.UnsupportedError, pagedkv.OutOfBlocksError):
            pass

    @rule(data=st.data())
    def explain(self, data):
        for block in range(self.cache.num_blocks):
            assert self.cache.explain(block)["block"] == block
        if self.items:
            assert self.one(data).seq.explain()

    # -- what holds after every rule -------------------------------------------------------------------------------

    @invariant()
    def is_sound(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.check()
        held, owners = set(), {}
        for item in self.items:
            table = item.seq.blocks.tolist()
            assert item.seq.length == len(item.tokens)
            assert len(table) * self.block_size >= len(item.tokens)
            for index, block in enumerate(table):
                if block < 0:
                    assert self.window and (index + 1) * self.block_size <= len(item.tokens) - self.window + 1
                    continue
                held.add(block)
                other_index, other = owners.setdefault(block, (index, item))
                end = min(len(item.tokens), len(other.tokens), (index + 1) * self.block_size)
                first = 0 if item.num_exact is None and other.num_exact is None else index * self.block_size
                assert other_index == index and item.tokens[first:end] == other.tokens[first:end]
        stats = self.cache.stats()
        pending = {block for transfer, _ in self.transfers for block in transfer.blocks.tolist()} - held
        assert len(pending) - stats["pinned_blocks"] <= stats["pending_blocks"] <= len(pending)
        assert stats["uncached_blocks"] + stats["cached_blocks"] + stats["held_blocks"] + stats["pending_blocks"] == \
            self.cache.num_blocks
        assert stats["num_transfers"] == len(self.transfers)
        assert len(held) <= stats["held_blocks"] <= len(held) + stats["pinned_blocks"]
        assert stats["num_sequences"] == len(self.items) and stats["num_pins"] == len(self.pins)
        for _, prompt, namespace in self.pins:
            assert self.cache.probe(prompt + [0], namespace=namespace) >= len(prompt)
        self.apply_events()
        assert stats["dropped_events"] == 0

    def apply_events(self):
        for event in self.cache.read_events():
            name, kind = bytes(event["hash"]), int(event["kind"])
            if kind == 4:
                self.findable = {key: value for key, value in self.findable.items()
                                 if event["block"] == -1 and value[1] != event["namespace"]}
            elif kind == 2:
                assert self.findable.pop(name)[0] == event["block"]
            else:
                assert (name in self.findable) == (kind == 3)
                self.findable[name] = (int(event["block"]), int(event["namespace"]))

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close_many([item.seq for item in self.items])
            for transfer, _ in self.transfers:
                transfer.finish()
            self.cache.reset()
            assert self.cache.num_free_blocks == self.cache.num_blocks and self.cache.num_cached_blocks == 0


class NeverRaised(Exception):
    pass


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_any_program_of_calls(eviction):
    end = time.monotonic() + SECONDS / len(EVICTIONS)
    seed, num_rounds = START, 0
    while num_rounds == 0 or time.monotonic() < end:
        machine = hypothesis.seed(seed)(type("Machine", (Machine,), {"eviction": eviction}))
        options = hypothesis.settings(max_examples=10, stateful_step_count=40, deadline=None, database=None,
                                      suppress_health_check=list(hypothesis.HealthCheck))
        try:
            run_state_machine_as_test(machine, settings=options)
        except BaseException:
            print(f"PAGEDKV_FUZZ_START={seed} pytest 'tests/fuzz/test_stateful.py::test_any_program_of_calls[{eviction}]'")
            raise
        seed, num_rounds = seed + 1, num_rounds + 1
    print(f"{eviction}: {num_rounds} rounds of 10 programs, seeds {START} to {seed - 1}")
