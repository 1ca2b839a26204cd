"""Number formats in plain numpy: every stored dtype as bits, rounding into it and the exact value of its bits.

Independent of the library: written from IEEE 754 and the OCP 8-bit floating point specification. Rounding is to
nearest, ties to even. float8 and int8 saturate; float16 and bfloat16 overflow to infinity.
"""
import numpy as np

FLOATS = ("float32", "float16", "bfloat16")
QUANTISED = ("float8_e4m3", "float8_e5m2", "int8")
ALL = FLOATS + QUANTISED

# The numpy type that carries the bits.
STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16,
           "float8_e4m3": np.uint8, "float8_e5m2": np.uint8, "int8": np.int8}
# Largest magnitude of the quantised dtypes.
QMAX = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Unit of rounding: half the distance from 1 to the next value.
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# A byte that makes every element NaN; for int8, which has no NaN, the largest value, and a huge float32 as its scale.
POISON = {"float32": 0xFF, "float16": 0xFF, "bfloat16": 0xFF, "float8_e4m3": 0xFF, "float8_e5m2": 0xFF, "int8": 0x7F}


def _make_float8_values(exponent_bits, mantissa_bits, bias, num_finite):
    """Values of the codes 0 .. num_finite - 1 (sign 0), ascending."""
    codes = np.arange(num_finite)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


_FLOAT8_VALUES = {"float8_e4m3": _make_float8_values(4, 3, 7, 0x7F), "float8_e5m2": _make_float8_values(5, 2, 15, 0x7C)}


def _make_float8_table(dtype):
    positive = np.full(128, np.nan)
    positive[: len(_FLOAT8_VALUES[dtype])] = _FLOAT8_VALUES[dtype]
    if dtype == "float8_e5m2":
        positive[0x7C] = np.inf
    return np.concatenate([positive, -positive])


_FLOAT8_TABLE = {dtype: _make_float8_table(dtype) for dtype in ("float8_e4m3", "float8_e5m2")}


def decode(bits, dtype):
    """The exact values of bits, as float64."""
    bits = np.asarray(bits)
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):  # NaN among them
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _FLOAT8_TABLE:
        return _FLOAT8_TABLE[dtype][bits.view(np.uint8)]
    return bits.astype(np.float64)


def encode(values, dtype):
    """float32 values rounded to dtype, as bits."""
    values = np.asarray(values, dtype=np.float32)
    if dtype == "float32":
        return values.copy()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)
    if dtype == "int8":
        return np.clip(np.rint(values), -127, 127).astype(np.int8)
    finite = _FLOAT8_VALUES[dtype]
    magnitude = np.minimum(np.abs(values.astype(np.float64)), finite[-1])
    middles = (finite[1:] + finite[:-1]) / 2
    low = np.searchsorted(middles, magnitude, side="left")  # a tie goes down ...
    is_tie = np.isin(magnitude, middles)
    code = np.where(is_tie & (low % 2 == 1), low + 1, low)  # ... unless the even code is above
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def quantise(values, dtype, kv_scales="static", scale=None):
    """What write_kv stores of float32 values [tokens, heads, dim].

    Returns (bits, scales): scales are float32 [tokens, heads] for "token_head", else the static ones, [heads], or None
    for a dtype that is not quantised.
    """
    values = np.asarray(values, dtype=np.float32)
    if dtype not in QUANTISED:
        return encode(values, dtype), None
    if kv_scales == "token_head":
        scales = np.abs(values).max(axis=-1) / np.float32(QMAX[dtype])
        divisors = np.where(scales > 0, scales, np.float32(1))[..., None]
    else:
        scales = np.ones(values.shape[-2], np.float32) if scale is None else np.asarray(scale, np.float32)
        divisors = scales[:, None]
    return encode(values / divisors, dtype), scales


def dequantise(bits, dtype, scales=None):
    values = decode(bits, dtype)
    return values if scales is None else values * scales.astype(np.float64)[..., None]
