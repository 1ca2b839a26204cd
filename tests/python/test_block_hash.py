"""The public block hash: the vectors of docs/block-hash.md, and Python's own SHA-256."""

import hashlib
import pathlib
import re
import struct

import numpy as np
import pytest

import pagedkv

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "block-hash.md"


def reference(tokens, parent=None, namespace=0):
    tokens = b"".join(struct.pack("<q", token) for token in tokens)
    return hashlib.sha256(b"pagedkv-block-v1" + (parent or bytes(32)) + struct.pack("<Q", namespace) + tokens).digest()


def test_the_vectors_of_the_document():
    hashes = {}
    for row, parent, namespace, tokens, text in re.findall(
        r"^\| (\d+) \| *(\d*) *\| (\d+) \| ([\d ]+) \| `([0-9a-f]{64})` \|$", DOCUMENT.read_text(), re.MULTILINE
    ):
        arguments = [int(token) for token in tokens.split()], hashes.get(parent), int(namespace)
        hashes[row] = bytes.fromhex(text)
        assert pagedkv.block_hash(*arguments) == hashes[row] == reference(*arguments)
    assert len(hashes) == 6


def test_random_blocks():
    random = np.random.default_rng(1)
    parent = None
    for block_size in (*range(0, 20), 63, 64, 65, 127, 128, 129, 1000):
        namespace = int(random.integers(0, 2**64, dtype=np.uint64))
        tokens = random.integers(0, 2**63 - 1, block_size)
        hash = pagedkv.block_hash(tokens, parent=parent, namespace=namespace)
        assert type(hash) is bytes and hash == reference(tokens.tolist(), parent, namespace)
        parent = hash


def test_kinds_of_arguments(refuses):
    parent = bytes(range(32))
    expected = reference([1, 2], parent)
    for tokens in ([1, 2], (1, 2), np.int32([1, 2]), np.uint64([1, 2])):
        for given in (parent, bytearray(parent), memoryview(parent)):
            assert pagedkv.block_hash(tokens, given) == expected
    for arguments, text in (
        (([1, -1],), "tokens[1] is -1"), (([1.5],), "tokens"), (([1], b"x"), "32 bytes"),
        (([1], bytes(33)), "32 bytes"), (([1], "0" * 32), "32 bytes"), (([1], None, -1), "namespace"),
        (([1], None, 2**64), "namespace"),
    ):  # fmt: skip
        with refuses(None, pagedkv.InvalidArgumentError, text):
            pagedkv.block_hash(*arguments)
