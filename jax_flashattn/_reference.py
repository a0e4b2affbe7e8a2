"""Attention in plain jax.numpy: what the kernels compute, written to be read.

This module defines the semantics; it is never on a fast path. Letters as in `jax.nn`: B batch, T
query length, S key length, N query heads, K key/value heads (query head n reads key head n // (N /
K)), H head dim, V value dim. Shapes are given for layout "BTNH"; in "BNTH" heads come before
lengths.

`attention` is `prefill`:

1. Scores. s = scale * (q . k), scale 1/sqrt(H) unless given. With a soft cap c: s = c * tanh(s /
   c). Then ALiBi adds -slope[n] * |p - j| and the bias is added. p = i + shift is the position of
   query i among the keys; shift is (key length - query length) of the sequence in bottom-right
   alignment, 0 in top-left. Lengths are those given for the sequence, clamped to [0, T] and [0,
   S]; else T and S.
2. Visibility. Query i sees key j iff i and j lie inside their lengths, p - left <= j <= p + right
   for the window (left, right) (None: no limit; an int w: (w, w)), j <= p if causal, the mask is
   true, and both have the same segment id.
3. Softmax over the visible keys, in float32 (float64 for float64 inputs). A sink is one more logit
   of its head that has no value: it takes probability and gives nothing.
4. Results. out = softmax . v in the dtype of the query; lse = log sum exp of the visible scores,
   the sink's included, in float32 (float64 for float64 inputs). A query that sees no key has
   output 0 and lse -inf, or lse = sink if its head has one. A query beyond the query length has
   output 0 and lse -inf, sink or not. Such queries pass no gradient on, but for the sink's own
   through lse = sink.
5. Keys that no query sees, and queries that see no key, are not read: NaN there changes nothing,
   and their gradients are 0.

`decode` is the same with T new tokens that are the last T of the seq_lens tokens in a cache:
causal, bottom-right, so that query i sees keys j <= seq_len - T + i. A window (w, 0) leaves keys j
>= p - w. A paged cache is a pool of pages; page_table[b, j // page_size] names the page of token
j, and an id outside the pool means that its tokens are absent. 8-bit caches are multiplied by
their scales.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def attention(
    query,
    key,
    value,
    causal=True,
    scale=None,
    *,
    layout="BTNH",
    bias=None,
    mask=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logit_softcap=None,
    causal_alignment="bottom_right",
    query_segment_ids=None,
    key_value_segment_ids=None,
    alibi_slopes=None,
    sinks=None,
):
    """The operation `prefill` on rank-4 operands. Returns (out, lse)."""
    if layout == "BNTH":
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    batch, q_len, q_heads, head_dim = query.shape
    kv_len, kv_heads = key.shape[1:3]
    group = q_heads // kv_heads
    dtype = query.dtype
    wide = _wide(dtype)

    q_lengths = _lengths(query_seq_lengths, batch, q_len)
    kv_lengths = _lengths(key_value_seq_lengths, batch, kv_len)
    position = jnp.broadcast_to(jnp.arange(q_len, dtype=jnp.int32)[None, :], (batch, q_len))
    if causal_alignment == "bottom_right":
        position += (kv_lengths - q_lengths)[:, None]
    offset = (
        jnp.arange(kv_len, dtype=jnp.int32)[None, None, :] - position[:, :, None]
    )  # (B, T, S): j - p

    inside = _below(q_lengths, q_len)  # (B, T)
    visible = inside[:, :, None] & _below(kv_lengths, kv_len)[:, None, :]
    left, right = window(local_window_size, causal)
    if left is not None:
        visible &= offset >= -left
    if right is not None:
        visible &= offset <= right
    if query_segment_ids is not None:
        visible &= query_segment_ids[:, :, None] == key_value_segment_ids[:, None, :]
    visible = jnp.broadcast_to(visible[:, None], (batch, q_heads, q_len, kv_len))
    if mask is not None:
        visible &= mask

    # What is not read is replaced by zeros, so that nothing of it can reach a sum.
    sees = visible.any(axis=3).swapaxes(1, 2)  # (B, T, N)
    seen = visible.reshape(batch, kv_heads, group * q_len, kv_len).any(axis=2).swapaxes(1, 2)
    query = jnp.where(sees[..., None], query, jnp.zeros((), dtype))
    key = jnp.where(seen[..., None], key, jnp.zeros((), key.dtype))
    value = jnp.where(seen[..., None], value, jnp.zeros((), value.dtype))

    if scale is None:
        scale = 1 / np.sqrt(head_dim)
    grouped = query.reshape(batch, q_len, kv_heads, group, head_dim)
    scores = _product("btkgh,bskh->bkgts", grouped, key).reshape(visible.shape)
    scores = scores * jnp.asarray(scale, wide)
    if logit_softcap is not None:
        cap = jnp.asarray(logit_softcap, wide)
        scores = cap * jnp.tanh(scores / cap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(wide)[None, :, None, None]
        scores = scores - slopes * jnp.abs(offset).astype(wide)[:, None]
    if bias is not None:
        scores = scores + bias.astype(wide)
    scores = jnp.where(visible, scores, -jnp.inf)

    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True, initial=-jnp.inf))
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(wide)[None, :, None, None], top.shape)
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, jnp.zeros((), wide), top)  # an empty row: exp(-inf - 0) = 0
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    empty = total == 0
    safe_total = jnp.where(empty, jnp.ones((), wide), total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe_total))[..., 0]  # (B, N, T)
    lse = jnp.where(inside[:, None, :], lse, -jnp.inf)

    probs = (weights / safe_total).astype(dtype).reshape(batch, kv_heads, group, q_len, kv_len)
    out = _product("bkgts,bskv->btkgv", probs, value)
    out = out.reshape(batch, q_len, q_heads, value.shape[-1]).astype(dtype)
    if layout == "BNTH":
        return out.swapaxes(1, 2), lse
    return out, lse.swapaxes(1, 2)


def decode(
    query,
    key_cache,
    value_cache,
    seq_lens,
    scale=None,
    *,
    layout="BTNH",
    value_dim=None,
    page_table=None,
    key_scale=None,
    value_scale=None,
    local_window_size=None,
    logit_softcap=None,
    sinks=None,
):
    """The operation `decode` on rank-4 operands. Returns (out, lse)."""
    if value_cache is None:
        value_cache, value_scale = key_cache[..., :value_dim], key_scale
    if layout == "BNTH":
        query, key_cache, value_cache = (x.swapaxes(1, 2) for x in (query, key_cache, value_cache))
    key = _dequantise(key_cache, key_scale, query.dtype)
    value = _dequantise(value_cache, value_scale, query.dtype)
    mask = None
    if page_table is not None:
        present = (page_table >= 0) & (page_table < key.shape[0])
        page_size = key.shape[1]
        key, value = (_gather_pages(x, page_table, present) for x in (key, value))
        mask = jnp.repeat(present, page_size, axis=1)[:, None, None, :]
    out, lse = attention(
        query,
        key,
        value,
        scale=scale,
        mask=mask,
        key_value_seq_lengths=seq_lens,
        local_window_size=None if local_window_size is None else (window(local_window_size)[0], 0),
        logit_softcap=logit_softcap,
        sinks=sinks,
    )
    return (out.swapaxes(1, 2), lse.swapaxes(1, 2)) if layout == "BNTH" else (out, lse)


def merge(outs, lses, layout="BTNH"):
    """The attention over the union of disjoint sets of keys, from the results over each set."""
    lses = jnp.stack(list(lses))
    top = lses.max(axis=0)
    top = jnp.where(top == -jnp.inf, jnp.zeros((), top.dtype), top)
    weights = jnp.exp(lses - top[None])
    total = weights.sum(axis=0)
    empty = total == 0
    safe_total = jnp.where(empty, jnp.ones((), total.dtype), total)
    outs = jnp.stack(list(outs))
    out = (outs.astype(total.dtype) * (weights / safe_total[None])[..., None]).sum(axis=0)
    return out.astype(outs.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(safe_total))


def window(local_window_size, causal=False):
    """(left, right) with None for no limit; causal is a limit of 0 on the right."""
    if local_window_size is None:
        left, right = None, None
    elif isinstance(local_window_size, (tuple, list)):
        left, right = local_window_size
    else:
        left = right = local_window_size
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _product(spec, left, right):
    """A product that accumulates in float32 or wider. Its derivative is rounded to the operands'
    dtype: every product of 16-bit attention takes 16-bit operands, the backward ones too."""
    result = jnp.einsum(spec, left, right, preferred_element_type=_wide(left.dtype))
    return _round_derivative(result, left.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_derivative(x, dtype):
    return x


@_round_derivative.defjvp
def _round_derivative_jvp(dtype, primals, tangents):
    (x,), (tangent,) = primals, tangents
    return x, tangent.astype(dtype).astype(x.dtype)


def _wide(dtype):
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _lengths(lengths, batch, capacity):
    if lengths is None:
        return jnp.full((batch,), capacity, jnp.int32)
    return jnp.clip(lengths, 0, capacity)


def _below(lengths, size):
    return jnp.arange(size, dtype=jnp.int32)[None, :] < lengths[:, None]


def _dequantise(cache, scale, dtype):
    """scale is (K,), or (pages, K) for a paged cache."""
    if scale is None:
        return cache.astype(dtype)
    scale = scale.astype(jnp.float32)
    scale = scale[None, None, :, None] if scale.ndim == 1 else scale[:, None, :, None]
    return (cache.astype(jnp.float32) * scale).astype(dtype)


def _gather_pages(pool, page_table, present):
    """(pages, page_size, K, H) and (B, max_pages) -> (B, max_pages * page_size, K, H)."""
    batch, max_pages = page_table.shape
    pages = pool[jnp.where(present, page_table, 0)]
    return pages.reshape(batch, max_pages * pool.shape[1], *pool.shape[2:])
