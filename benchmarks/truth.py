"""Is it right? A few rows of every result against float64, before anything is timed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from inputs import Inputs

GROSS_ERROR = 3e-2  # relative; beyond it a result is wrong and its time means nothing
ROW_BLOCK = 1024


class Truth:
    """`error(result)` is the largest absolute error of the rows looked at; `bound` is the rule for
    ours: twice the error of the same maths in XLA at the dtype, and one unit in the last place.
    """

    def __init__(self, inputs: Inputs):
        self.parts = _gradient_parts(inputs) if _is_backward(inputs) else _forward_parts(inputs)
        self.bound = max(part.bound for part in self.parts)

    def error(self, result) -> float:
        """Raises ArithmeticError when the result is grossly wrong."""
        worst = 0.0
        for part in self.parts:
            difference = part.pick(result) - part.value
            relative = np.linalg.norm(difference) / max(np.linalg.norm(part.value), 1e-30)
            if not relative <= GROSS_ERROR:
                raise ArithmeticError(f"wrong result: relative error {relative:.1e}")
            worst = max(worst, float(np.abs(difference).max(initial=0)))
        return worst


class Part:
    def __init__(self, pick, value: np.ndarray, xla: np.ndarray, dtype: str):
        self.pick, self.value = pick, value
        unit = float(jnp.finfo(dtype).eps)
        xla_error = np.abs(xla - value).max(initial=0)
        self.bound = float(2 * xla_error + unit * np.abs(value).max(initial=0))


def _is_backward(inputs: Inputs) -> bool:
    return inputs.case.benchmark == "backward"


def to_numpy(x) -> np.ndarray:
    if hasattr(x, "detach"):  # a torch tensor
        return x.detach().float().cpu().numpy().astype(np.float64)
    return np.asarray(x.astype(jnp.float32), np.float64)


# Forward ------------------------------------------------------------------------------------------


def _forward_parts(inputs: Inputs) -> list[Part]:
    case = inputs.case
    return [
        _forward_part(inputs, batch, head)
        for batch, head in sorted({(0, 0), (case.B - 1, case.N - 1)})
    ]


def _forward_part(inputs: Inputs, batch: int, head: int) -> Part:
    case = inputs.case
    # Only within the query's length: what lies behind it is nobody's promise but ours.
    rows = _sample_rows(min(case.T, case.lengths[batch]))
    operands = inputs.operands(0)[:3]
    if case.layers > 1:  # the first is looked at; the queries of the others depend on it
        operands = (operands[0], operands[1][0], operands[2][0])
    query, key, value = _one_head(case, operands, _quantisation(inputs), batch, head, rows)
    visible, bias = _visible_and_bias(inputs, batch, head, rows)
    sink = inputs.extra["sinks"][head] if "sinks" in inputs.extra else -math.inf
    features = {"softcap": case.feature("softcap"), "scale": case.H**-0.5}
    wide = [np.asarray(x, np.float64) for x in (query, key, value, bias)]
    truth = _attend(np, *wide, visible, np.float64(sink), **features)
    narrow = _attend_in_jax(
        query, key, value, np.float32(bias), visible, np.float32(sink), **features
    )

    def pick(out):
        out = out[0] if case.layers > 1 else out
        return to_numpy(_rows_of_head(case, out, batch, head, rows))

    return Part(pick, truth, to_numpy(narrow), case.dtype)


def _attend(xp, query, key, value, bias, visible, sink, *, softcap, scale):
    """Attention of rows of one head: in numpy the truth, in jax.numpy the same at the dtype."""
    wide = {} if xp is np else {"preferred_element_type": jnp.float32}
    scores = xp.matmul(query, key.T, **wide) * scale
    if softcap is not None:
        scores = softcap * xp.tanh(scores / softcap)
    scores = xp.where(visible, scores + bias, -xp.inf)
    top = xp.maximum(scores.max(-1, keepdims=True), sink)
    top = xp.where(top == -xp.inf, xp.zeros_like(top), top)
    weights = xp.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + xp.exp(sink - top)
    probabilities = (weights / xp.where(total == 0, 1, total)).astype(value.dtype)
    out = xp.matmul(probabilities, value, **wide)
    return out.astype(query.dtype)


_attend_in_jax = jax.jit(functools.partial(_attend, jnp), static_argnames=("softcap", "scale"))


def _sample_rows(length: int) -> np.ndarray:
    edges = np.array([0, 1, 63, 64, 127, 128, length - 1])
    drawn = np.random.default_rng(2).integers(0, length, 17)
    return np.unique(np.concatenate([edges[edges < length], drawn]))


def _quantisation(inputs: Inputs) -> dict:
    names = ("page_table", "key_scale", "value_scale")
    return {name: inputs.extra[name] for name in names if name in inputs.extra}


# One compilation each for a case: batch, head and rows are arguments.
@functools.partial(jax.jit, static_argnums=0)
def _one_head(case, operands, extra, batch, head, rows):
    """Query (rows, H), key and value (S, H), unpaged and dequantised, in the case's dtype."""
    query, key, value = operands
    if value is None:
        value = key[..., : case.value_dim]
    kv_head = head * case.K // case.N
    query = _rows_of_head(case, query, batch, head, rows)
    if case.feature("page"):
        pages = extra["page_table"][batch]
        key, value = (x[pages, :, kv_head].reshape(case.S, case.H) for x in (key, value))
    elif case.feature("layout") == "BNTH":
        key, value = key[batch, kv_head], value[batch, kv_head]
    else:
        key, value = key[batch, :, kv_head], value[batch, :, kv_head]
    if case.feature("cache"):
        key = key.astype(case.dtype) * extra["key_scale"][kv_head].astype(case.dtype)
        value = value.astype(case.dtype) * extra["value_scale"][kv_head].astype(case.dtype)
    return query, key, value


def _rows_of_head(case, x, batch, head, rows):
    """(rows, H) of an array like the query; of JAX or torch."""
    if not isinstance(x, jax.Array):
        return x[batch, :, head][rows]
    return _rows_of_head_in_jax(case.feature("layout") == "BNTH", x, batch, head, rows)


@functools.partial(jax.jit, static_argnums=0)
def _rows_of_head_in_jax(heads_first, x, batch, head, rows):
    return x[batch, head, rows] if heads_first else x[batch, rows, head]


def _visible_and_bias(inputs: Inputs, batch: int, head: int, rows: np.ndarray):
    case = inputs.case
    extra = {name: np.asarray(x) for name, x in inputs.extra.items() if name != "bias"}
    kv_name = "seq_lens" if case.benchmark == "decode" else "key_value_seq_lengths"
    q_length = extra["query_seq_lengths"][batch] if "query_seq_lengths" in extra else case.T
    kv_length = extra[kv_name][batch] if kv_name in extra else case.S
    position = (rows + kv_length - q_length)[:, None]
    column = np.arange(case.S)[None, :]
    visible = (rows[:, None] < q_length) & (column < kv_length)
    if case.causal:
        visible &= column <= position
    if "local_window_size" in extra:
        visible &= column >= position - extra["local_window_size"][0]
    if "query_segment_ids" in extra:
        ids = extra["query_segment_ids"][batch]
        visible &= ids[rows][:, None] == ids[None, :]
    if "mask" in extra:
        mask = extra["mask"][batch, 0]
        visible &= mask[rows] if len(mask) > 1 else mask
    bias = np.zeros((1, 1))
    if "alibi_slopes" in extra:
        bias = -extra["alibi_slopes"][head] * np.abs(column - position)
    if "bias" in inputs.extra:
        bias = bias + to_numpy(inputs.extra["bias"][0, head, rows])
    return visible, bias


# Gradients ----------------------------------------------------------------------------------------


def _gradient_parts(inputs: Inputs) -> list[Part]:
    """All gradients of the last sequence and key head."""
    case = inputs.case
    group = case.N // case.K
    heads, kv_head = slice(case.N - group, case.N), slice(case.K - 1, case.K)
    places = (heads, kv_head, kv_head, heads)
    one = [x[-1, :, place] for x, place in zip(inputs.operands(0), places, strict=True)]
    sinks = np.asarray(inputs.extra.get("sinks", np.full(case.N, -np.inf, np.float32)))[heads]

    softcap = case.feature("softcap")

    def visible_and_biases(rows):  # a bias a head of the group
        first = _visible_and_bias(inputs, case.B - 1, case.N - group, rows)
        if "alibi_slopes" not in inputs.extra and "bias" not in inputs.extra:
            return first[0], [first[1]] * group
        later = range(case.N - group + 1, case.N)
        biases = [_visible_and_bias(inputs, case.B - 1, head, rows)[1] for head in later]
        return first[0], [first[1], *biases]

    truth = _exact_gradients(*(to_numpy(x) for x in one), visible_and_biases, sinks, softcap)
    visible, biases = visible_and_biases(np.arange(case.T))
    biases = [np.float32(bias) for bias in biases]
    at_dtype = _gradients_in_xla(*one, visible, biases, sinks, softcap=softcap)

    def pick(index, place):
        # A result is (out, (dq, dk, dv)).
        return lambda result: to_numpy(result[1][index][case.B - 1, :, place])

    return [
        Part(pick(i, place), truth[i], to_numpy(at_dtype[i]), case.dtype)
        for i, place in enumerate(places[:3])
    ]


def _exact_gradients(query, key, value, cotangent, visible_and_biases, sinks, softcap):
    """(T, G, H) and (S, 1, H) arrays of float64; block by block of the rows of the scores."""
    length, group, head_dim = query.shape
    scale = head_dim**-0.5
    d_query, d_key, d_value = (np.zeros_like(x) for x in (query, key, value))
    for start in range(0, length, ROW_BLOCK):
        rows = slice(start, min(start + ROW_BLOCK, length))
        visible, biases = visible_and_biases(np.arange(length)[rows])
        for head in range(group):
            scores = query[rows, head] @ key[:, 0].T * scale
            slope = scale
            if softcap is not None:
                tanh = np.tanh(scores / softcap)
                scores, slope = softcap * tanh, scale * (1 - tanh**2)
            scores = np.where(visible, scores + biases[head], -np.inf)
            top = np.maximum(scores.max(1, keepdims=True), sinks[head])
            weights = np.exp(scores - top)
            weights /= weights.sum(1, keepdims=True) + np.exp(sinks[head] - top)
            d_weights = cotangent[rows, head] @ value[:, 0].T
            delta = (weights * d_weights).sum(1, keepdims=True)
            d_scores = weights * (d_weights - delta) * slope
            d_query[rows, head] = d_scores @ key[:, 0]
            d_key[:, 0] += d_scores.T @ query[rows, head]
            d_value[:, 0] += weights.T @ cotangent[rows, head]
    return d_query, d_key, d_value


@functools.partial(jax.jit, static_argnames="softcap")
def _gradients_in_xla(query, key, value, cotangent, visible, biases, sinks, *, softcap):
    options = {"softcap": softcap, "scale": query.shape[-1] ** -0.5}

    def attend(query, key, value):
        heads = [
            _attend(jnp, query[:, g], key[:, 0], value[:, 0], bias, visible, sinks[g], **options)
            for g, bias in enumerate(biases)
        ]
        return jnp.stack(heads, 1)

    return jax.vjp(attend, query, key, value)[1](cotangent)
