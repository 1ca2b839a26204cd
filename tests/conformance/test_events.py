"""Events for routers: whoever follows them knows at any time exactly what can be hit, and where it is."""
import numpy as np
import pytest

import pagedkv

from .caches import ids, make_cache, open_with, refused

STORED, REMOVED, MOVED, CLEARED = 1, 2, 3, 4
BLOCK_SIZE = 2


class Router:
    """Follows the events of a cache: public hash -> block and namespace."""

    def __init__(self, cache):
        self.cache, self.found, self.serial, self.kinds = cache, {}, 0, []

    def follow(self, max_events=None):
        for event in self.cache.read_events(max_events):
            assert event["serial"] == self.serial + 1, "an event is missing"
            self.serial = int(event["serial"])
            self.apply(int(event["kind"]), int(event["block"]), int(event["namespace"]), bytes(event["hash"]),
                       bytes(event["parent"]))
        return self

    def apply(self, kind, block, namespace, hash, parent):
        self.kinds.append(kind)
        if kind == STORED:
            assert hash not in self.found and block not in [where for where, _, _ in self.found.values()]
            self.found[hash] = block, namespace, parent
            return
        assert parent == bytes(32)
        if kind == REMOVED:
            assert self.found.pop(hash)[:2] == (block, namespace)
        elif kind == MOVED:
            former = self.found[hash]
            assert former[0] != block and former[1] == namespace
            self.found[hash] = block, namespace, former[2]
        else:
            assert kind == CLEARED and hash == bytes(32) and block in (-1, -2)
            self.found = {} if block == -2 else {hash: entry for hash, entry in self.found.items()
                                                 if entry[1] != namespace}

    def predict(self, tokens, namespace=0, salts=()):
        """Blocks that a prompt would hit."""
        blocks, parent = [], None
        for i in range((len(tokens) - 1) // BLOCK_SIZE):
            # Namespaces that the block passes through: those that end inside it are hashed as blocks without tokens.
            entered = [namespace] if i == 0 else []
            for start, region in salts:
                if start // BLOCK_SIZE == i and region != namespace:
                    entered.append(region)
                    namespace = region
            extended = parent
            for passed in entered[:-1]:
                extended = pagedkv.block_hash([], extended, passed)
            hash = pagedkv.block_hash(tokens[i * BLOCK_SIZE:(i + 1) * BLOCK_SIZE], extended, namespace)
            if hash not in self.found:
                break
            block, stored_namespace, stored_parent = self.found[hash]
            assert stored_namespace == namespace and stored_parent == (parent or bytes(32))
            blocks.append(block)
            parent = hash
        return blocks


def make(device, num_blocks=12, event_capacity=1000, **options):
    return make_cache(device, num_blocks, BLOCK_SIZE, event_capacity=event_capacity, **options)


def check_prediction(cache, router, tokens, namespace=0):
    seq = cache.open(ids(tokens), namespace=namespace)
    assert np.asarray(seq.blocks).tolist() == router.predict(tokens, namespace)
    seq.close()


def test_a_life(device):
    cache = make(device)
    router = Router(cache)
    seq = open_with(cache, range(5), namespace=9)
    router.follow()
    first = pagedkv.block_hash([0, 1], namespace=9)
    second = pagedkv.block_hash([2, 3], first, 9)
    blocks = np.asarray(seq.blocks).tolist()
    assert router.found == {first: (blocks[0], 9, bytes(32)), second: (blocks[1], 9, first)}
    seq.close()
    assert len(cache.read_events()) == 0  # what can be hit has not changed
    cache.evict(11)
    assert router.follow().kinds == [STORED, STORED, REMOVED] and list(router.found) == [first]
    cache.reset()
    assert router.follow().kinds[3:] == [CLEARED] and not router.found
    stats = cache.stats()
    assert (stats["num_events"], stats["dropped_events"]) == (4, 0)


def test_a_duplicate_takes_over(device):
    cache = make(device)
    router = Router(cache)
    batch = cache.batch(2, 16)
    pair = [cache.open(range(3)), cache.open(range(3))]
    batch.prepare(pair, [3, 3], tokens=[*range(3), *range(3)])
    assert router.follow().kinds == [STORED]
    [(block, _, _)] = router.found.values()
    owner = next(seq for seq in pair if seq.blocks[0] == block)
    other = next(seq for seq in pair if seq.blocks[0] != block)
    owner.truncate(1)
    owner.append([7])
    assert router.follow().kinds == [STORED, MOVED, STORED]
    assert router.found[pagedkv.block_hash([0, 1])][0] == other.blocks[0]
    check_prediction(cache, router, range(3))


def test_a_discarded_step(device):
    cache = make(device)
    router = Router(cache)
    batch = cache.batch(2, 16)
    seq = cache.open([])
    batch.prepare([seq], [4], tokens=range(4))
    cache.discard(batch)
    assert router.follow().kinds == [STORED, STORED, REMOVED, REMOVED] and not router.found
    batch.prepare([seq], [4], tokens=range(4), register=False)
    assert router.follow().kinds[4:] == []
    seq.commit(range(4))
    assert router.follow().kinds[4:] == [STORED, STORED]


@pytest.mark.parametrize("uses_regions", [False, True])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "slru", "s3fifo", "priority"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(device, seed, eviction, uses_regions):
    random = np.random.default_rng([seed, 77])
    invalidated = False
    cache = make(device, int(random.integers(4, 16)), eviction=eviction)
    router, batch, sequences, prompts, hits = Router(cache), cache.batch(4, 64), [], [], 0

    def draw_salts():
        starts = sorted(set(random.integers(1, 12, random.integers(0, 3)).tolist())) if uses_regions else []
        return [(start, int(random.integers(0, 3))) for start in starts]

    def draw_tokens(longest):
        tokens = random.integers(0, 2, random.integers(0, longest)).tolist()
        return (prompts[random.integers(len(prompts))][:random.integers(1, 20)] if prompts and random.random() < 0.5
                else []) + tokens

    def step(register=True, tokens_known=True):
        chosen = random.permutation(len(sequences))[:random.integers(1, 5)]
        counts = random.integers(0, 5, len(chosen)).tolist()
        tokens = random.integers(0, 2, sum(counts))
        if not tokens_known:
            tokens[random.random(len(tokens)) < 0.3] = -1
        batch.prepare([sequences[i] for i in chosen], counts, tokens=tokens, register=register)

    def commit(seq):
        tokens = stored_tokens(seq)[seq.settled_length:]
        count = int(random.integers(0, len(tokens) + 1))
        seq.commit([int(random.integers(0, 2)) if token == -1 else -2 - token if token < -1 else token
                    for token in tokens[:count]])

    for _ in range(400):
        kind = random.random()
        try:
            if kind < 0.2 or not sequences:
                tokens = draw_tokens(9)
                prompts.append(tokens)
                seq = cache.open(ids(tokens), namespace=int(random.integers(0, 2)), priority=int(random.integers(0, 2)),
                                 salts=draw_salts())
                sequences.append(seq)
                seq.append(ids(tokens[seq.length:]))
            elif kind < 0.4:
                step()
            elif kind < 0.48:
                step(register=False)
            elif kind < 0.54:
                step(tokens_known=False)
            elif kind < 0.6:
                step()
                cache.discard(batch)
            elif kind < 0.66:
                commit(sequences[random.integers(len(sequences))])
            elif kind < 0.74:
                seq = sequences[random.integers(len(sequences))]
                seq.truncate(int(random.integers(0, seq.length + 1)))
            elif kind < 0.8:
                seq = sequences[random.integers(len(sequences))]
                sequences.append(seq.fork(int(random.integers(0, seq.length + 1))))
            elif uses_regions and kind < 0.82:
                cache.invalidate(int(random.integers(0, 3)))
                invalidated = True
            elif kind < 0.83:
                cache.evict(int(random.integers(0, cache.num_blocks)))
            elif kind < 0.84:
                for seq in sequences:
                    seq.close()
                sequences.clear()
                cache.reset()
            else:
                sequences.pop(random.integers(len(sequences))).close()
        except (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError):
            if sequences:
                sequences.pop(0).close()
        router.follow()
        registered = {block for block in range(cache.num_blocks) if cache.explain(block)["is_registered"]}
        found = {block for block, _, _ in router.found.values()}
        assert found <= registered if invalidated else found == registered
        for namespace in (0, 1):
            tokens, salts = draw_tokens(9), draw_salts()
            predicted = router.predict(tokens, namespace, salts)
            assert cache.probe(ids(tokens), namespace=namespace, salts=salts) == len(predicted) * BLOCK_SIZE
            seq = cache.open(ids(tokens), namespace=namespace, salts=salts)
            blocks = np.asarray(seq.blocks).tolist()
            assert blocks == predicted
            hits += len(blocks)
            seq.close()
    assert hits > (20 if uses_regions else 50) and {STORED, REMOVED, CLEARED} <= set(router.kinds)
    cache.check()


def stored_tokens(seq):
    from .test_snapshot import tokens_of
    return tokens_of(seq)


def test_a_full_ring_drops_what_is_new(device):
    cache = make(device, event_capacity=3)
    seq = open_with(cache, range(13))
    stats = cache.stats()
    assert (stats["num_events"], stats["dropped_events"]) == (6, 3)
    events = cache.read_events()
    assert events["serial"].tolist() == [1, 2, 3]
    assert events["block"].tolist() == np.asarray(seq.blocks)[:3].tolist()
    seq.append([50, 51])
    assert cache.read_events()["serial"].tolist() == [7]  # 4 to 6 are missing: whoever reads can tell


def test_reading_in_parts(device):
    cache = make(device)
    open_with(cache, range(11))
    assert cache.read_events(2)["serial"].tolist() == [1, 2]
    assert cache.read_events(0)["serial"].tolist() == []
    assert cache.read_events(max_events=100)["serial"].tolist() == [3, 4, 5]
    events = cache.read_events()
    assert len(events) == 0 and events.dtype.names == ("serial", "kind", "block", "namespace", "hash", "parent")
    assert events.dtype.itemsize == 88


def test_many_events_at_once(device):
    cache = make(device, num_blocks=5000, event_capacity=10000)
    seq = open_with(cache, range(10000))
    assert cache.read_events()["block"].tolist() == np.asarray(seq.blocks).tolist()


def test_off_by_default(device):
    cache = make(device, event_capacity=0)
    open_with(cache, range(9))
    with refused(cache, pagedkv.UnsupportedError):
        cache.read_events()
    assert cache.stats()["num_events"] == 0
    cache = make(device, prefix_caching=False)
    open_with(cache, range(9))
    assert len(cache.read_events()) == 0


def test_bad_values(device):
    for bad in (-1, 2**63, 1.5, "3", None):
        with pytest.raises(pagedkv.InvalidArgumentError, match="event_capacity"):
            make(device, event_capacity=bad)
    cache = make(device)
    for bad in (-1, 2**63, 1.5, "3"):
        with pytest.raises(pagedkv.InvalidArgumentError, match="max_events"):
            cache.read_events(bad)


def test_loaded_prefixes_are_told(device, tmp_path):
    source = make(device)
    open_with(source, range(9))
    open_with(source, [*range(4), 50, 51, 52])
    source.save(tmp_path / "tree")
    cache = make(device)
    router = Router(cache)
    open_with(cache, range(4))
    assert cache.load(tmp_path / "tree") == 3
    assert router.follow().kinds == [STORED] * 5
    check_prediction(cache, router, [*range(9)])
    check_prediction(cache, router, [*range(4), 50, 51, 52])
