"""The same maths in XLA, at the dtype of the operands: what the accuracy rule measures against.

Every function returns several draws of one result, from the same numbers in another order (head
dims reversed, keys reversed): the largest error of a single draw is too much a matter of luck.

What a query sees is computed by truth.py and handed to `jax_flashattn._reference` as one mask, and
lengths are padded up to tiles, so that few programs are compiled for many tests.
"""

import functools

import jax
import numpy as np
import truth

from jax_flashattn import _reference

TILE = 64
DRAWS = ((False, False), (True, False), (False, True), (True, True))  # reversed: (dims, keys)


def attention(query, key, value, **arguments):
    """Draws of the output of prefill; operands and options as for truth.attention."""
    problem = truth.Problem(query, key, value, **arguments)

    def draw(dims, keys):
        out = np.asarray(_forward(_operands(problem, query.dtype, dims, keys)))
        return problem.outward(_reversed(out[:, : problem.q_len], 3, dims))

    with jax.enable_x64(query.dtype == np.float64):
        return [draw(*order) for order in DRAWS]


def decode(query, *args, **arguments):
    """Draws of the output of decode; operands and options as for truth.decode."""
    dtype = query.dtype
    query, key, value, options = truth.decode_as_attention(query, *args, **arguments)
    draws = attention(query.astype(dtype), key.astype(dtype), value.astype(dtype), **options)
    return [x.swapaxes(1, 2) for x in draws] if arguments.get("layout") == "BNTH" else draws


def gradients(dout, dlse, query, key, value, **arguments):
    """By operand, draws of what truth.gradients returns, in the dtype of the operand."""
    problem = truth.Problem(query, key, value, **arguments)
    dtype = query.dtype
    wide = _wide(dtype)
    dout = problem.inward(dout).astype(dtype)
    dlse = np.zeros(dout.shape[:3], wide) if dlse is None else problem.inward(dlse).astype(wide)

    def draw(dims, keys):
        operands = _operands(problem, dtype, dims, keys)
        grads = _backward(operands, _padded(_reversed(dout, 3, dims), 1), _padded(dlse, 1))
        grads = {name: np.asarray(x) for name, x in grads.items()}
        for name, length, axis in (
            ("query", problem.q_len, None),
            ("key", problem.kv_len, 1),
            ("value", problem.kv_len, 1),
        ):
            grad = _reversed(grads[name][:, :length], 3, dims)
            grads[name] = problem.outward(_reversed(grad, 1, keys and axis == 1))
        grad = grads.pop("bias", None)
        if problem.bias is not None:
            bias = arguments["bias"]
            grad = _reversed(grad[:, :, : problem.q_len, : problem.kv_len], 3, keys)
            grads["bias"] = truth.sum_to(grad.astype(np.float64), bias.shape).astype(bias.dtype)
        return grads

    with jax.enable_x64(dtype == np.float64):
        draws = [draw(*order) for order in DRAWS]
    return {name: [d[name] for d in draws] for name in draws[0]}


def _operands(problem, dtype, dims, keys):
    wide = _wide(dtype)
    visible, distance = problem.visible_everywhere()

    def scores(x):
        return _padded(_padded(_reversed(x, 3, keys), 2), 3)

    operands = {
        "query": _padded(_reversed(problem.query.astype(dtype), 3, dims), 1),
        "mask": scores(visible),
        "scale": wide(problem.scale),
    }
    for name, x in (("key", problem.key), ("value", problem.value)):
        x = _reversed(_reversed(x.astype(dtype), 3, dims), 1, keys)
        operands[name] = _padded(x, 1)
    bias = 0.0 if problem.bias is None else problem.bias
    if problem.slopes is not None:
        bias = bias - problem.slopes[None, :, None, None] * distance[:, None]
    if np.ndim(bias):
        operands["bias"] = scores(bias.astype(wide))
    if problem.sinks is not None:
        operands["sinks"] = problem.sinks.astype(np.float32)
    if problem.softcap is not None:
        operands["logit_softcap"] = wide(problem.softcap)
    return operands


def _wide(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def _reversed(x, axis, really):
    return np.flip(x, axis) if really else x


def _padded(x, axis):
    """With zeros to whole tiles."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % TILE)
    return np.pad(x, width)


@jax.jit
def _forward(operands):
    return _reference.attention(**operands, causal=False)[0]


@jax.jit
def _backward(operands, dout, dlse):
    moving = {n: operands[n] for n in ("query", "key", "value", "bias", "sinks") if n in operands}
    rest = {n: x for n, x in operands.items() if n not in moving}
    run = functools.partial(_reference.attention, **rest, causal=False)
    return jax.vjp(lambda moving: run(**moving), moving)[1]((dout, dlse))[0]
