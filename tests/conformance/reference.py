"""Attention in float64, as plainly as it can be written: what every backend is compared with."""
import numpy as np


def attend(q, k, v, *, scale=None, causal=True, window=None, softcap=None, sinks=None, alibi_slopes=None,
           tree_mask=None):
    """q: [queries, num_heads, head_dim], the last tokens of the sequence; k: [keys, num_kv_heads, head_dim];
    v: [keys, num_kv_heads, v_head_dim]. Returns out [queries, num_heads, v_head_dim] and lse [queries, num_heads].
    tree_mask: [queries, at least queries], in place of causal among the last tokens."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, v_head_dim = v.shape
    out = np.zeros((num_queries, num_heads, v_head_dim))
    lse = np.full((num_queries, num_heads), -np.inf)
    if num_queries == 0:
        return out, lse
    scale = 1.0 / np.sqrt(head_dim) if scale is None else scale
    query_position = num_keys - num_queries + np.arange(num_queries)[:, None]
    distance = np.arange(num_keys)[None, :] - query_position  # key - query, [queries, keys]
    is_seen = np.ones((num_queries, num_keys), bool)
    if tree_mask is not None:
        is_seen[:, num_keys - num_queries:] = tree_mask[:, :num_queries]
    elif causal:
        is_seen &= distance <= 0
    if window is not None:
        is_seen &= distance > -window
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        score = q[:, head].astype(np.float64) @ k[:, kv_head].astype(np.float64).T * scale
        if softcap is not None:
            score = softcap * np.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score + float(alibi_slopes[head]) * distance
        score = np.where(is_seen, score, -np.inf)
        sink = -np.inf if sinks is None else float(sinks[head])
        top = np.maximum(score.max(axis=1, initial=-np.inf), sink)
        has_any = is_seen.any(axis=1)
        top = np.where(has_any, top, 0)
        weight = np.exp(score - top[:, None])
        values = np.where(is_seen.any(axis=0)[:, None], v[:, kv_head].astype(np.float64), 0)
        total = weight.sum(axis=1) + (np.exp(sink - top) if sinks is not None else 0)
        out[has_any, head] = (weight @ values)[has_any] / total[has_any, None]
        lse[has_any, head] = np.log(total[has_any]) + top[has_any]
    return out, lse


def merge_states(out_a, lse_a, out_b, lse_b):
    """Attention over two disjoint sets of keys, put together."""
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0, top)
    weight_a, weight_b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = weight_a + weight_b
    with np.errstate(divide="ignore", invalid="ignore"):
        out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / total[..., None]
        lse = np.log(total) + safe
    return np.where(total[..., None] == 0, 0, out), lse
