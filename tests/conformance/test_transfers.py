"""Transfers between two caches by an engine that delivers late, twice, partly or never. Every row of K and V can be
recognised, so what an engine writes into somebody else's blocks shows."""
import threading

import numpy as np
import pytest

import pagedkv

from .caches import count_states, refused
from .marked import Marked, MarkedCache

BLOCK_SIZE = 4


class Engine:
    """Copies blocks from one cache's memory into another's, in a thread of its own, when it is let. What it has begun it
    does not take back."""

    def __init__(self, device, source, target):
        if device == "host":
            self.view, self.wait = np.asarray, lambda: None
        else:
            import cupy

            self.view, self.wait = cupy.asarray, cupy.cuda.runtime.deviceSynchronize
        self.source, self.target = self.view(source.cache), self.view(target.cache)
        self.jobs = []

    def start(self, sources, targets, count=None):
        """The first `count` blocks, None for all, once the returned job is let go; wait for its end by finish()."""
        job = Job(self, np.asarray(sources).tolist(), np.asarray(targets).tolist(), count)
        self.jobs.append(job)
        return job

    def close(self):
        for job in self.jobs:
            job.finish()


class Job:
    def __init__(self, engine, sources, targets, count):
        self.pairs = list(zip(sources, targets))[:count]
        self.engine, self.may_go = engine, threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        self.may_go.wait()
        for source, target in self.pairs:
            self.engine.target[target] = self.engine.source[source]
        self.engine.wait()

    def finish(self):
        self.may_go.set()
        self.thread.join()


@pytest.fixture
def peers(device):
    """Two caches, and an engine between them."""
    a, b = (MarkedCache(device, 12, block_size=BLOCK_SIZE, hash_seed=1) for _ in "ab")
    b._rows = a._rows  # one model
    engine = Engine(device, a, b)
    yield a, b, engine
    engine.close()
    engine.source = engine.target = None  # views of the memory


def wait_for_writes(device):
    if device != "host":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def adopt(seq, sent):
    """What was sent, as far as it has arrived."""
    length = seq.length
    return Marked(seq, sent.tokens[:length], sent.k[:length], sent.v[:length])


def prompt(first, count):
    return list(range(first, first + count))


def test_in_time(device, peers):
    a, b, engine = peers
    sent = a.open_with(prompt(10, 14))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(4, priority=2, tag=7)
    assert sending.blocks.tolist() == sent.seq.blocks.tolist() and len(receiving.blocks) == 4
    assert count_states(b.cache) == (8, 0, 0, 4)
    engine.start(sending.blocks, receiving.blocks).finish()
    seq = receiving.commit(sent.tokens)
    assert (seq.length, seq.settled_length, seq.num_cached_tokens, seq.tag) == (14, 14, 0, 7)
    received = adopt(seq, sent)
    assert not receiving.is_open and count_states(b.cache) == (8, 0, 4, 0)
    sending.finish()
    b.check([received])
    assert b.cache.probe(sent.tokens) == 12
    b.step([(received, [1, 2, 3])])
    b.check([received])
    a.check([sent])


def test_the_sender_moves_on_at_once(device, peers):
    """The sequence is closed and its blocks are wanted for others, but they stay until the engine has read them."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 24))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(6)
    job = engine.start(sending.blocks, receiving.blocks)
    sent.seq.close()
    assert count_states(a.cache) == (6, 0, 0, 6)
    others = [a.open_with(prompt(100 * i, 12)) for i in (1, 2)]
    with refused(a.cache, pagedkv.OutOfBlocksError) as record:
        others[0].seq.append([1])
    assert record.value.available == 0
    again = a.open(sent.tokens)  # what is on its way can still be hit
    assert again.seq.length == 20
    job.finish()
    sending.finish()
    received = adopt(receiving.commit(sent.tokens), sent)
    b.check([received])
    a.check([*others, again])


def test_late(device, peers):
    """The deadline passes. Until the engine is known to be done nobody gets the blocks, and nothing is overwritten."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 20))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(5)
    job = engine.start(sending.blocks, receiving.blocks)
    receiving.quarantine()
    assert receiving.is_quarantined and b.cache.stats()["quarantined_blocks"] == 5
    with refused(b.cache, pagedkv.BusyError):
        receiving.commit(sent.tokens)
    own = [b.open_with(prompt(1000, 16)), b.open_with(prompt(2000, 12))]
    with refused(b.cache, pagedkv.OutOfBlocksError):
        own[0].seq.append([5])
    explained = b.cache.explain(int(receiving.blocks[0]))
    assert explained["state"] == "pending" and not explained["can_be_evicted"]
    assert explained["transfers"] == [{"transfer": receiving.id, "state": "quarantined"}]
    job.finish()  # now it lands
    b.check(own)
    receiving.finish()
    sending.finish()
    assert count_states(b.cache)[3] == 0
    b.step([(own[0], [5])])
    b.check(own)
    with pytest.raises(pagedkv.NotFoundError):
        receiving.finish()


def test_twice(device, peers):
    """A request is sent again after its deadline, and then both deliveries arrive."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 16))
    wait_for_writes(device)
    sendings = [a.cache.send(sent.seq), a.cache.send(sent.seq)]
    first, second = b.cache.receive(4), b.cache.receive(4)
    late = engine.start(sendings[0].blocks, first.blocks)
    first.quarantine()
    retry = engine.start(sendings[1].blocks, second.blocks)
    retry.finish()
    retry.run()  # the same bytes once more, before the commit
    received = adopt(second.commit(sent.tokens), sent)
    b.step([(received, [1])])
    late.finish()
    b.check([received])
    first.finish()
    for sending in sendings:
        sending.finish()
    assert count_states(b.cache) == (7, 0, 5, 0) and count_states(a.cache)[3] == 0
    b.check([received])


def test_partly(device, peers):
    """Two blocks and a half of four came: what is missing is computed here."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 16))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(4)
    engine.start(sending.blocks, receiving.blocks, 3).finish()
    received = adopt(receiving.commit(sent.tokens[:10]), sent)
    assert received.seq.length == 10 and count_states(b.cache) == (9, 0, 3, 0)
    b.step([(received, sent.tokens[10:])])
    b.check([received])
    assert b.cache.probe(sent.tokens + [0]) == 16
    sending.finish()


def test_never(device, peers):
    a, b, engine = peers
    sent = a.open_with(prompt(10, 8))
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(3)
    receiving.quarantine()
    sending.quarantine()
    for i in range(1, 6):
        marked = b.open_with(prompt(100 * i, 30))
        b.check([marked])
        marked.seq.close()
        assert count_states(b.cache)[3] == 3
    with refused(b.cache, pagedkv.BusyError):
        b.cache.reset()
    with pytest.raises(pagedkv.BusyError):
        b.cache.close()
    receiving.finish()  # the peer is known to be dead
    sending.finish()
    assert count_states(b.cache)[3] == count_states(a.cache)[3] == 0
    b.cache.reset()


def test_a_duplicate_arrives(device, peers):
    """The same prompt was computed here meanwhile: the registered block stays the one that is found."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 8))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(2)
    own = b.open_with(sent.tokens)
    engine.start(sending.blocks, receiving.blocks).finish()
    received = adopt(receiving.commit(sent.tokens), sent)
    sending.finish()
    b.check([own, received])
    reader = b.cache.open(sent.tokens + [0])
    assert reader.blocks.tolist() == own.seq.blocks.tolist()
    received.seq.close()
    assert count_states(b.cache) == (10, 0, 2, 0)


def test_written_while_it_is_sent(device, peers):
    """Whoever writes into a block that is being read gets a copy."""
    a, b, engine = peers
    sent = a.open_with(prompt(10, 6))
    wait_for_writes(device)
    sending, receiving = a.cache.send(sent.seq), b.cache.receive(2)
    job = engine.start(sending.blocks, receiving.blocks)
    picture = Marked(None, sent.tokens[:], sent.k[:], sent.v[:])
    sent.seq.truncate(5)
    sent.cut(5)
    a.step([(sent, [77, 78])])
    job.finish()
    sending.finish()
    received = adopt(receiving.commit(picture.tokens), picture)
    b.check([received])
    a.check([sent])


def test_events_tell_what_arrived(device):
    cache = pagedkv.Cache(pagedkv.Layout(1, 1, 8, dtype="float32", block_size=4), num_blocks=8, device=device,
                          event_capacity=100)
    receiving = cache.receive(3)
    assert len(cache.read_events()) == 0
    with receiving.commit(range(9)):
        events = cache.read_events()
        assert events["kind"].tolist() == [1, 1]
        assert events["block"].tolist() == receiving.blocks[:2].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_random_deliveries(device, seed):
    """Many requests from a to b, whose deliveries end in any order and any way, while both caches work."""
    rng = np.random.default_rng(seed)
    a, b = (MarkedCache(device, 24, block_size=BLOCK_SIZE, hash_seed=seed + 1) for _ in "ab")
    b._rows = a._rows
    engine = Engine(device, a, b)
    live_a, live_b, flights = [], [], []  # flights: (what is sent, sending, receiving, job)
    for _ in range(120):
        action = rng.integers(6)
        if action <= 1:
            tokens = prompt(int(rng.integers(3)) * 1000, int(rng.integers(1, 15))) + rng.integers(0, 9, 3).tolist()
            try:
                cache, live = ((a, live_a), (b, live_b))[action]
                live.append(cache.open_with(tokens))
            except pagedkv.OutOfBlocksError:
                if live:
                    live.pop(int(rng.integers(len(live)))).seq.close()
        elif action == 2 and live_a:
            sent = live_a[int(rng.integers(len(live_a)))]
            try:
                receiving = b.cache.receive(-(-len(sent.tokens) // BLOCK_SIZE))
            except pagedkv.OutOfBlocksError:
                if live_b:
                    live_b.pop(int(rng.integers(len(live_b)))).seq.close()
                continue
            wait_for_writes(device)
            sending = a.cache.send(sent.seq)
            flights.append((sent.copy(None), sending, receiving, engine.start(sending.blocks, receiving.blocks)))
            if rng.random() < 0.5:
                live_a.remove(sent)
                sent.seq.close()
        elif action == 3 and flights:
            sent, sending, receiving, job = flights.pop(int(rng.integers(len(flights))))
            job.finish()
            sending.finish()
            if receiving.is_quarantined or rng.random() < 0.2:
                receiving.finish()
            else:
                arrived = sent.tokens[:int(rng.integers(1, len(sent.tokens) + 1))]
                live_b.append(adopt(receiving.commit(arrived), sent))
        elif action == 4 and flights:
            flights[int(rng.integers(len(flights)))][2].quarantine()
        elif action == 5 and live_b:
            marked = live_b[int(rng.integers(len(live_b)))]
            try:
                b.step([(marked, rng.integers(0, 9, 2).tolist())])
            except pagedkv.OutOfBlocksError:
                live_b.remove(marked)
                marked.seq.close()
        a.check(live_a)
        b.check(live_b)
        count_states(a.cache), count_states(b.cache)
    for sent, sending, receiving, job in flights:
        job.finish()
        sending.finish()
        receiving.finish()
    for marked in live_a + live_b:
        marked.seq.close()
    for cache in (a.cache, b.cache):
        assert count_states(cache)[2:] == (0, 0)
        cache.reset()
    engine.source = engine.target = None
