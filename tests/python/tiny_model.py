"""A GGUF file of a small random model of SmolLM2's kind, and what was put into it."""

import struct

import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 2, 8, 2, 8, 96
EMBEDDING = HEADS * HEAD_DIM
CONTROL = ["<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ t"]


def spell_bytes():
    """The printable characters of a byte vocabulary: those that Latin-1 cannot show stand from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte if byte in shown else 256 + sum(other not in shown for other in range(byte))) for byte in range(256)]


VOCABULARY = CONTROL + spell_bytes() + [merge.replace(" ", "") for merge in MERGES]


def pack_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value):
    if isinstance(value, str):
        return struct.pack("<I", 8) + pack_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    head = struct.pack("<I", 9)
    if isinstance(value[0], str):
        return head + struct.pack("<IQ", 8, len(value)) + b"".join(map(pack_string, value))
    return head + struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)


def quantise_q8_0(values):
    """(bytes, values as they will be read)."""
    groups = values.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1) / 127).astype(np.float16)
    q = np.rint(groups / scale[:, None].astype(np.float32)).clip(-127, 127).astype(np.int8)
    data = np.concatenate([scale[:, None].view(np.uint8).reshape(-1, 2), q.view(np.uint8)], axis=1)
    return data.tobytes(), (q * scale.astype(np.float32)[:, None]).reshape(values.shape)


def quantise_q4_1(values):
    groups = values.reshape(-1, 32)
    least = groups.min(axis=1).astype(np.float16)
    scale = ((groups.max(axis=1) - least) / 15).astype(np.float16)
    wide = [x.astype(np.float32)[:, None] for x in (scale, least)]
    q = np.rint((groups - wide[1]) / wide[0]).clip(0, 15).astype(np.uint8)
    head = np.stack([scale, least], axis=1).view(np.uint8)
    data = np.concatenate([head, q[:, :16] | q[:, 16:] << 4], axis=1)
    return data.tobytes(), (q * wide[0] + wide[1]).reshape(values.shape)


FORMATS = {
    0: lambda values: (values.tobytes(), values),
    1: lambda values: (values.astype(np.float16).tobytes(), values.astype(np.float16).astype(np.float32)),
    3: quantise_q4_1,
    8: quantise_q8_0,
}


def write_tiny_model(path, seed=1):
    """Writes the file; returns its tensors as float32."""
    random = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (8, len(VOCABULARY), EMBEDDING), "output.weight": (1, len(VOCABULARY), EMBEDDING),
              "output_norm.weight": (0, EMBEDDING)}
    for layer in range(LAYERS):
        matrices = {"attn_q": (EMBEDDING, EMBEDDING), "attn_k": (KV_HEADS * HEAD_DIM, EMBEDDING),
                    "attn_v": (KV_HEADS * HEAD_DIM, EMBEDDING), "attn_output": (EMBEDDING, EMBEDDING),
                    "ffn_gate": (FEED_FORWARD, EMBEDDING), "ffn_up": (FEED_FORWARD, EMBEDDING),
                    "ffn_down": (EMBEDDING, FEED_FORWARD)}
        shapes.update({f"blk.{layer}.{name}.weight": (3, *shape) for name, shape in matrices.items()})
        shapes.update({f"blk.{layer}.{name}.weight": (0, EMBEDDING) for name in ("attn_norm", "ffn_norm")})
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": EMBEDDING,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 1,
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    head += b"".join(pack_string(key) + pack_value(value) for key, value in metadata.items())
    tensors, body = {}, b""
    for name, (kind, *shape) in shapes.items():
        values = random.standard_normal(shape).astype(np.float32) * 0.3 + (1 if len(shape) == 1 else 0)
        data, tensors[name] = FORMATS[kind](values.astype(np.float32))
        head += pack_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return tensors
