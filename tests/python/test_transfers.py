"""Transfers in Python: arguments, lifetimes, what they say of themselves; the memory to register; the fingerprint."""
import copy
import gc
import hashlib
import json
import pathlib
import pickle
import re
import struct

import pytest

import pagedkv
from pagedkv.cli import main

LAYOUT = pagedkv.Layout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)


@pytest.fixture
def cache():
    return pagedkv.Cache(LAYOUT, num_blocks=8, device="host")


@pytest.fixture
def sequence(cache):
    seq = cache.open([])
    seq.append(range(10))
    return seq


def test_a_transfer_shows_itself(cache, sequence):
    sending, receiving = cache.send(sequence, 4), cache.receive(2)
    assert sending.blocks.tolist() == sequence.blocks[1:].tolist() and sending.blocks.dtype == "int32"
    assert not sending.blocks.flags.writeable
    assert (sending.is_receiving, receiving.is_receiving) == (False, True)
    assert "3 blocks, sending" in repr(cache.send(sequence)) and "2 blocks, receiving" in repr(receiving)
    receiving.quarantine()
    assert "quarantined" in repr(receiving) and receiving.is_quarantined and receiving.is_open
    assert sending.id != receiving.id
    receiving.finish()
    assert repr(receiving) == "<pagedkv.Transfer over>" and not receiving.is_open
    assert len(receiving.blocks) == 2  # its array outlives it
    for call in (receiving.finish, receiving.quarantine, lambda: receiving.commit([1]), lambda: receiving.id):
        with pytest.raises(pagedkv.NotFoundError):
            call()


def test_arguments(cache, sequence):
    other = pagedkv.Cache(LAYOUT, num_blocks=2, device="host")
    with pytest.raises(TypeError):
        pagedkv.Transfer()
    transfer = cache.receive(1)
    for call in (
        lambda: cache.send(7),
        lambda: cache.send(other.open([])),
        lambda: cache.send(sequence, "0"),
        lambda: cache.send(sequence, 0, -1),
        lambda: cache.send(sequence, 3, 3),
        lambda: cache.send(sequence, 0, 11),
        lambda: cache.send(sequence, stream="s"),
        lambda: cache.receive(0),
        lambda: cache.receive(None),
        lambda: cache.receive(1, namespace=-1),
        lambda: cache.receive(1, priority="high"),
        lambda: cache.receive(1, salts=[(0, 1)]),
        lambda: cache.receive(1, stream=1.5),
        lambda: transfer.commit(None),
        lambda: transfer.commit([-1]),
        lambda: transfer.commit([1] * 5),
        lambda: transfer.commit([1], stream="s"),
        lambda: LAYOUT.fingerprint("model"),
    ):
        with pytest.raises(pagedkv.InvalidArgumentError):
            call()
    assert cache.stats()["num_transfers"] == 1
    closed = cache.open([])
    closed.close()
    with pytest.raises(pagedkv.NotFoundError):
        cache.send(closed)
    with pytest.raises(pagedkv.NeverFitsError):
        cache.receive(9)
    with pytest.raises(pagedkv.OutOfBlocksError) as record:
        cache.receive(5)
    assert (record.value.needed, record.value.available) == (5, 4)
    for call in (lambda: pickle.dumps(transfer), lambda: copy.copy(transfer)):
        with pytest.raises(TypeError):
            call()


def test_dropping_the_object_does_not_end_it(cache):
    cache.receive(3)
    gc.collect()
    stats = cache.stats()
    assert stats["pending_blocks"] == 3 and stats["num_transfers"] == 1
    with pytest.raises(pagedkv.BusyError, match="1 transfers"):
        cache.close()
    with pytest.raises(pagedkv.BusyError):
        cache.reset()


def test_a_transfer_keeps_its_cache():
    transfer = pagedkv.Cache(LAYOUT, num_blocks=4, device="host").receive(2)
    gc.collect()
    with transfer.commit([1, 2, 3]) as seq:
        assert seq.length == 3


def test_salts_and_namespaces_of_what_arrives(cache):
    tokens = list(range(100, 109))
    with cache.receive(3, namespace=5, salts=[(4, 6)]).commit(tokens):
        assert cache.probe(tokens, namespace=5, salts=[(4, 6)]) == 8
        assert cache.probe(tokens, namespace=5) == 4 and cache.probe(tokens) == 0
        assert cache.namespace_stats(6)["held_blocks"] == 2


def test_a_recording_has_the_transfers(capsys, tmp_path, cache):
    path = tmp_path / "calls"
    cache.trace_start(path)
    seq = cache.open(range(10))
    seq.append(range(10))
    sending = cache.send(seq, 0, 9)
    receiving = cache.receive(2, namespace=3)
    late = cache.receive(1)
    late.quarantine()
    with pytest.raises(pagedkv.BusyError):
        late.commit([1])
    seq.close()
    with receiving.commit(range(7)):
        sending.finish()
        late.finish()
    cache.trace_stop()
    capsys.readouterr()
    assert main(["replay", str(path), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verified"] is True and result["refused_calls"] == 1


def test_regions(cache):
    [region] = cache.regions()
    assert region == {
        "base": cache.base_ptr, "bytes": 8 * LAYOUT.block_bytes, "block_bytes": LAYOUT.block_bytes, "first_block": 0,
        "num_blocks": 8, "device": "host",
    }
    assert cache.block_ptr(7) == region["base"] + 7 * region["block_bytes"]


def fingerprint(numbers, model=b""):
    """As docs/transfers.md has it."""
    return hashlib.sha256(b"pagedkv-layout-v1" + struct.pack("<9IQ", *numbers, len(model)) + model).digest()


def test_fingerprint():
    assert LAYOUT.fingerprint() == fingerprint([4, 1, 2, 2, 8, 8, 1, 0, 0])
    assert LAYOUT.fingerprint(b"name@1") == fingerprint([4, 1, 2, 2, 8, 8, 1, 0, 0], b"name@1")
    quantised = pagedkv.Layout(32, 8, 128, dtype="float8_e4m3", block_size=16, v_head_dim=64, order="head_token",
                               kv_scales="token_head")
    assert quantised.fingerprint() == fingerprint([16, 1, 32, 8, 128, 64, 4, 1, 1])
    assert LAYOUT.fingerprint() == pickle.loads(pickle.dumps(LAYOUT)).fingerprint()


def test_the_documented_vectors():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "transfers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Layout\(.*\))` \| `(b\".*\")` \| `([0-9a-f]{64})` \|$", text, re.MULTILINE)
    assert len(rows) >= 3
    for layout, model, digest in rows:
        assert eval(layout, {"Layout": pagedkv.Layout}).fingerprint(eval(model)).hex() == digest


def test_regions_of_several_devices():
    cache = pagedkv.Cache(LAYOUT, num_blocks=8, devices=["host", "host"], shard="heads")
    regions = cache.regions()
    assert len(regions) == 2 and regions[0]["base"] != regions[1]["base"]
    for region in regions:
        assert region["bytes"] == 8 * region["block_bytes"] and region["num_blocks"] == 8
