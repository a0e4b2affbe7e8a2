"""Attention and its gradients in float64 numpy, one head at a time, straight from the formulas.

Shares no code with `jax_flashattn._reference`: the two are each other's check (test_reference.py).
Operands and options are those of `prefill` and `decode`, of rank 4. NaN and inf follow the
definition exactly: they reach the rows that see them and no other.
"""

import numpy as np


def attention(query, key, value, **arguments):
    """(out, lse) of prefill, in float64."""
    problem = Problem(query, key, value, **arguments)
    out = np.zeros(problem.query.shape[:3] + problem.value.shape[3:])
    lse = np.full(problem.query.shape[:3], -np.inf)
    for b, n in np.ndindex(problem.batch, problem.q_heads):
        head = problem.head(b, n)
        out[b, :, n] = head.out
        lse[b, :, n] = head.lse
    return problem.outward(out), problem.outward(lse)


def gradients(dout, dlse, query, key, value, **arguments):
    """A dict with the float64 gradient of sum(dout * out) + sum(dlse * lse) for every float operand
    given; dlse may be None. Rows without a lse that depends on anything take no cotangent."""
    problem = Problem(query, key, value, **arguments)
    dout = problem.inward(dout)
    dlse = np.zeros(dout.shape[:3]) if dlse is None else problem.inward(dlse)
    dquery, dkey, dvalue = (np.zeros(x.shape) for x in (problem.query, problem.key, problem.value))
    dscores = np.zeros((problem.batch, problem.q_heads, problem.q_len, problem.kv_len))
    dsinks = np.zeros(problem.q_heads)
    dslopes = np.zeros(problem.q_heads)
    for b, n in np.ndindex(problem.batch, problem.q_heads):
        head = problem.head(b, n)
        kv = n // problem.group
        alive = head.visible.any(axis=1)
        rows = np.where(alive[:, None], dout[b, :, n], 0.0)
        has_lse = np.isfinite(head.lse)
        drow = np.where(has_lse, dlse[b, :, n] - (rows * head.clean_out).sum(axis=1), 0.0)
        ds = head.probs * (rows @ head.value.T + drow[:, None])
        ds = np.where(head.visible, ds, 0.0)
        dscores[b, n] = ds
        if problem.sinks is not None:
            finite_lse = np.where(has_lse, head.lse, np.inf)
            dsinks[n] += (np.exp(problem.sinks[n] - finite_lse) * drow).sum()
        dslopes[n] -= (ds * head.distance).sum()
        dlogits = ds * head.cap_slope * problem.scale
        dquery[b, :, n] = dlogits @ head.key
        dkey[b, :, kv] += dlogits.T @ head.query
        dvalue[b, :, kv] += head.probs.T @ rows
    grads = dict(query=dquery, key=dkey, value=dvalue)
    grads = {name: problem.outward(g) for name, g in grads.items()}
    if problem.bias is not None:
        grads["bias"] = sum_to(dscores, np.shape(arguments["bias"]))
    if problem.sinks is not None:
        grads["sinks"] = dsinks
    if problem.slopes is not None:
        grads["alibi_slopes"] = dslopes
    return grads


def decode(query, key_cache, value_cache, seq_lens, **arguments):
    """(out, lse) of decode, in float64."""
    query, key, value, options = decode_as_attention(
        query, key_cache, value_cache, seq_lens, **arguments
    )
    out, lse = attention(query, key, value, **options)
    if arguments.get("layout", "BTNH") == "BNTH":
        return out.swapaxes(1, 2), lse.swapaxes(1, 2)
    return out, lse


def decode_as_attention(
    query,
    key_cache,
    value_cache,
    seq_lens,
    *,
    layout="BTNH",
    value_dim=None,
    page_table=None,
    key_scale=None,
    value_scale=None,
    local_window_size=None,
    **options,
):
    """The prefill operands and options (BTNH) that say the same as a decode call."""
    if value_cache is None:
        value_cache, value_scale = key_cache[..., :value_dim], key_scale
    query, key, value = (np.asarray(x, np.float64) for x in (query, key_cache, value_cache))
    if layout == "BNTH":
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    key, value = _dequantise(key, key_scale), _dequantise(value, value_scale)
    if page_table is not None:
        key, value, present = _gather(key, value, np.asarray(page_table))
        options["mask"] = present[:, None, None, :]
    if local_window_size is not None:
        left = local_window_size[0] if np.ndim(local_window_size) else local_window_size
        options["local_window_size"] = (left, 0)
    return query, key, value, dict(options, causal=True, key_value_seq_lengths=seq_lens)


def visible_keys(query, key, value, **arguments):
    """Bool (B, N, T, S): which keys each query sees."""
    return Problem(query, key, value, **arguments).visible_everywhere()[0]


class Problem:
    """A prefill call: operands in float64 and layout BTNH, options resolved."""

    def __init__(
        self,
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
        self.layout = layout
        self.query, self.key, self.value = (self.inward(x) for x in (query, key, value))
        self.batch, self.q_len, self.q_heads, head_dim = self.query.shape
        self.kv_len, kv_heads = self.key.shape[1:3]
        self.group = self.q_heads // kv_heads
        self.scale = 1 / np.sqrt(head_dim) if scale is None else float(scale)
        self.softcap = logit_softcap
        self.q_lengths = self._clamped(query_seq_lengths, self.q_len)
        self.kv_lengths = self._clamped(key_value_seq_lengths, self.kv_len)
        self.bottom_right = causal_alignment == "bottom_right"
        left, right = local_window_size if np.ndim(local_window_size) else [local_window_size] * 2
        self.left = np.inf if left is None else left
        self.right = min(0 if causal else np.inf, np.inf if right is None else right)
        full = (self.batch, self.q_heads, self.q_len, self.kv_len)
        self.mask = np.broadcast_to(True if mask is None else np.asarray(mask), full)
        self.bias = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), full)
        self.q_segments, self.kv_segments = (
            None if x is None else np.asarray(x) for x in (query_segment_ids, key_value_segment_ids)
        )
        self.slopes, self.sinks = (
            None if x is None else np.asarray(x, np.float64) for x in (alibi_slopes, sinks)
        )

    def inward(self, x):
        return self.outward(np.asarray(x, np.float64))

    def outward(self, x):
        """Between this layout and BTNH: swapping is its own inverse."""
        return x.swapaxes(1, 2) if self.layout == "BNTH" else x

    def _clamped(self, lengths, capacity):
        lengths = np.full(self.batch, capacity) if lengths is None else np.asarray(lengths)
        return np.clip(lengths, 0, capacity)

    def visible(self, b, n):
        """What head n sees, and the distance of every key from every query's own position."""
        q_len, kv_len = self.q_lengths[b], self.kv_lengths[b]
        i, j = np.arange(self.q_len)[:, None], np.arange(self.kv_len)[None, :]
        position = i + (kv_len - q_len if self.bottom_right else 0)
        seen = (i < q_len) & (j < kv_len)
        seen = seen & (position - self.left <= j) & (j <= position + self.right)
        seen = seen & self.mask[b, n]
        if self.q_segments is not None:
            seen = seen & (self.q_segments[b][:, None] == self.kv_segments[b][None, :])
        return seen, np.abs(position - j)

    def visible_everywhere(self):
        """Bool (B, N, T, S), and the distances, which do not depend on the head, (B, T, S)."""
        shape = (self.batch, self.q_heads, self.q_len, self.kv_len)
        visible = np.zeros(shape, bool)
        distance = np.zeros((self.batch, self.q_len, self.kv_len))
        for b, n in np.ndindex(shape[:2]):
            visible[b, n], distance[b] = self.visible(b, n)
        return visible, distance

    def head(self, b, n):
        return _Head(self, b, n)


class _Head:
    """One head of one sequence: scores, probabilities, results."""

    def __init__(self, problem, b, n):
        kv = n // problem.group
        seen, distance = problem.visible(b, n)
        self.visible, self.distance = seen, distance
        key_seen, query_sees = seen.any(axis=0), seen.any(axis=1)
        self.query = np.where(query_sees[:, None], problem.query[b, :, n], 0.0)
        self.key = np.where(key_seen[:, None], problem.key[b, :, kv], 0.0)
        self.value = np.where(key_seen[:, None], problem.value[b, :, kv], 0.0)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            scores = problem.scale * (self.query @ self.key.T)
            self.cap_slope = np.ones(())
            if problem.softcap is not None:
                squashed = np.tanh(scores / problem.softcap)
                scores = problem.softcap * squashed
                self.cap_slope = 1 - squashed**2
            if problem.slopes is not None:
                scores = scores - problem.slopes[n] * distance
            if problem.bias is not None:
                scores = scores + problem.bias[b, n]
            scores = np.where(seen, scores, -np.inf)
            sink = -np.inf if problem.sinks is None else problem.sinks[n]
            top = np.maximum(scores.max(axis=1, initial=-np.inf), sink)
            top = np.where(top == -np.inf, 0.0, top)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1) + np.exp(sink - top)
            self.lse = np.where(total == 0, -np.inf, top + np.log(total))
            self.lse = np.where(np.arange(problem.q_len) < problem.q_lengths[b], self.lse, -np.inf)
            self.probs = np.where(seen, weights / np.where(total == 0, 1.0, total)[:, None], 0.0)
            # A product would carry a NaN of v to rows that do not see it.
            finite = np.isfinite(self.value)
            self.clean_out = self.probs @ np.where(finite, self.value, 0.0)
            self.out = self.clean_out.copy()
            for j in np.flatnonzero(~finite.all(axis=1)):
                odd = np.where(finite[j], 0.0, self.value[j])
                self.out += np.where(seen[:, j, None], self.probs[:, j, None] * odd, 0.0)


def _dequantise(cache, scale):
    if scale is None:
        return cache
    scale = np.asarray(scale, np.float64)
    return cache * (scale[None, None, :, None] if scale.ndim == 1 else scale[:, None, :, None])


def _gather(key, value, page_table):
    pages, page_size = key.shape[:2]
    batch, max_pages = page_table.shape
    present = (page_table >= 0) & (page_table < pages)
    index = np.where(present, page_table, 0)
    flat = (batch, max_pages * page_size)
    key, value = (x[index].reshape(flat + x.shape[2:]) for x in (key, value))
    return key, value, np.repeat(present, page_size, axis=1)


def sum_to(x, shape):
    return _reduce_to(np.sum, x, shape)


def any_over_broadcast(visible, shape):
    return _reduce_to(np.any, visible, shape)


def _reduce_to(reduce, x, shape):
    """Over the axes that an operand of this shape broadcasts over."""
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] != 1)
    return reduce(x, axis=axes, keepdims=True)
