"""Attention and its gradients in NumPy and float64, written from the documentation alone.

Nothing of the library is used, least of all its masks: an error there must not cancel here.
"""

import math

import ml_dtypes
import numpy as np


def visible(q_len, kv_len, causal=False, sliding_window=None):
    """[q, kv]: who sees whom."""
    both = (sliding_window, sliding_window) if isinstance(sliding_window, int) else sliding_window
    left, right = (None, None) if both is None else both
    seen = np.zeros((q_len, kv_len), bool)
    for i in range(q_len):
        # Where query i stands among the keys: at its own place, or as far from the end as it is.
        place = kv_len - q_len + i if causal == "lower_right" else i
        for j in range(kv_len):
            seen[i, j] = (
                (not causal or j <= place)
                and (left is None or j >= place - left)
                and (right is None or j <= place + right)
            )
    return seen


def packed(ends_q, ends_k, q_len, kv_len, **rules):
    """The same for sequences that lie one after the other, from `ends[n]` to `ends[n + 1]`; the rest sees nothing."""
    seen = np.zeros((q_len, kv_len), bool)
    for start_q, stop_q, start_k, stop_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        seen[start_q:stop_q, start_k:stop_k] = visible(stop_q - start_q, stop_k - start_k, **rules)
    return seen


def _seen(batch, q_len, kv_len, kwargs):
    """[batch, q, kv] by places and segments."""
    rules = {name: kwargs[name] for name in ("causal", "sliding_window") if name in kwargs}
    ends = [kwargs.get(name) for name in ("cum_seqlens_q", "cum_seqlens_k")]
    if any(x is not None for x in ends):
        ends_q, ends_k = (np.asarray(x if x is not None else other) for x, other in zip(ends, ends[::-1], strict=True))
        rows = [np.broadcast_to(x, (batch, x.shape[-1])).tolist() for x in (ends_q, ends_k)]
        return np.stack([packed(*row, q_len, kv_len, **rules) for row in zip(*rows, strict=True)])
    seen = np.broadcast_to(visible(q_len, kv_len, **rules), (batch, q_len, kv_len))
    ids = [kwargs.get(name) for name in ("q_segment_ids", "kv_segment_ids")]
    if all(x is None for x in ids):
        return seen
    of_q, of_k = (np.asarray(x if x is not None else other) for x, other in zip(ids, ids[::-1], strict=True))
    return seen & (of_q[:, :, None] == of_k[:, None, :])


def _kept(seed, batch, heads, q_len, kv_len, prob):
    """Which weights dropout keeps: a hash of seed, head, row and column, in 32 bits."""

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    head, row, col = np.ogrid[: batch * heads, :q_len, :kv_len]
    wrap = lambda x: x & 0xFFFFFFFF
    head, row, col = (x.astype(np.uint64) for x in (head, row, col))
    line = mixed(wrap(np.uint64(int(seed) & 0xFFFFFFFF) + wrap(head * np.uint64(0x9E3779B9))))
    line = mixed(line ^ wrap(row * np.uint64(0x85EBCA6B)))
    bits = mixed(wrap(line + wrap(col * np.uint64(0xC2B2AE35))))
    return (bits >= round(prob * 2**32)).reshape(batch, heads, q_len, kv_len)


def _unbroadcast(x, shape):
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)


def attend(args, kwargs, dout_of):
    """Output and gradients, by name; `dout_of(shape)` is the gradient of the output."""
    query, key, value, bias, aux = (None if x is None else np.asarray(x, np.float64) for x in args)
    (batch, q_len, heads, dim), (kv_len, kv_heads) = query.shape, key.shape[1:3]
    group = heads // kv_heads
    q, k, v = query.swapaxes(1, 2), *(x.swapaxes(1, 2).repeat(group, axis=1) for x in (key, value))
    scale = kwargs.get("softmax_scale", 1 / math.sqrt(dim))
    s = q @ k.swapaxes(2, 3) * scale
    if "logits_dtype" in kwargs:
        dtype = kwargs["logits_dtype"]
        s = s.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype)).astype(np.float64)
    slope = np.ones_like(s)
    if (cap := kwargs.get("logits_soft_cap")) is not None:
        slope, s = 1 - np.tanh(s / cap) ** 2, cap * np.tanh(s / cap)
    s = s if bias is None else s + bias
    seen = np.broadcast_to(_seen(batch, q_len, kv_len, kwargs)[:, None], s.shape)
    if (mask := kwargs.get("attention_mask")) is not None:
        seen = seen & np.asarray(mask)
    sinks = np.zeros((heads, 0)) if aux is None else aux.reshape(aux.shape[0], -1).repeat(heads // aux.shape[0], axis=0)
    in_rows = np.broadcast_to(sinks[None, :, None], (batch, heads, q_len, sinks.shape[1]))
    logits = np.concatenate([np.where(seen, s, -np.inf), in_rows], axis=3)
    top = logits.max(axis=3, keepdims=True, initial=-np.inf)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0))
    normal = kwargs.get("normalize_output", True)
    total = p.sum(axis=3, keepdims=True)
    p = p / np.where(total > 0, total, 1) if normal else p
    p, to_sinks = p[..., :kv_len], p[..., kv_len:]
    keep = np.ones_like(p)
    if prob := kwargs.get("dropout_prob", 0.0):
        keep = _kept(kwargs["dropout_seed"], batch, heads, q_len, kv_len, prob) / (1 - prob)
    out = ((p * keep) @ v).swapaxes(1, 2)

    dout = dout_of(out.shape).swapaxes(1, 2)
    by_key_head = lambda x: x.reshape(batch, kv_heads, group, *x.shape[2:]).sum(axis=2).swapaxes(1, 2)
    dp = dout @ v.swapaxes(2, 3) * keep
    inner = (p * dp).sum(axis=3, keepdims=True) if normal else 0.0
    ds = p * (dp - inner)
    found = {"out": out, "dquery": None, "dkey": None, "dvalue": by_key_head((p * keep).swapaxes(2, 3) @ dout)}
    if bias is not None:
        found["dbias"] = _unbroadcast(ds, bias.shape)
    if aux is not None:
        daux = (-to_sinks * inner).sum(axis=(0, 2))
        found["dsoftmax_aux"] = _unbroadcast(daux, (aux.shape[0], sinks.shape[1])).reshape(aux.shape)
    ds = ds * slope * scale
    found["dquery"], found["dkey"] = (ds @ k).swapaxes(1, 2), by_key_head(ds.swapaxes(2, 3) @ q)
    return found
