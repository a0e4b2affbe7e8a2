"""The same maths in XLA, at the dtype of the operands: what the accuracy rule measures against.

What a query sees is computed by truth.py and handed to `jax_flashattn._reference` as one mask, and
lengths are padded up to tiles, so that few programs are compiled for many tests.
"""

import functools

import jax
import numpy as np
import truth

from jax_flashattn import _reference

TILE = 64


def attention(query, key, value, **arguments):
    """The output of prefill; operands and options as for truth.attention."""
    problem = truth.Problem(query, key, value, **arguments)
    with jax.enable_x64(query.dtype == np.float64):
        out = np.asarray(_forward(_operands(problem, query.dtype)))
    return problem.outward(out[:, : problem.q_len]).astype(query.dtype)


def decode(query, *args, **arguments):
    """The output of decode; operands and options as for truth.decode."""
    dtype = query.dtype
    query, key, value, options = truth.decode_as_attention(query, *args, **arguments)
    out = attention(query.astype(dtype), key.astype(dtype), value.astype(dtype), **options)
    return out.swapaxes(1, 2) if arguments.get("layout") == "BNTH" else out


def gradients(dout, dlse, query, key, value, **arguments):
    """As truth.gradients, each in the dtype of its operand."""
    problem = truth.Problem(query, key, value, **arguments)
    dtype = query.dtype
    wide = np.float64 if dtype == np.float64 else np.float32
    dout = _padded(problem.inward(dout).astype(dtype), 1)
    dlse = problem.inward(np.zeros(dout.shape[:3]) if dlse is None else dlse)
    with jax.enable_x64(dtype == np.float64):
        dlse = _padded(dlse.astype(wide), 1)[:, : dout.shape[1]]
        grads = _backward(_operands(problem, dtype), dout, dlse)
        grads = {name: np.asarray(x) for name, x in grads.items()}
    for name, length in (
        ("query", problem.q_len),
        ("key", problem.kv_len),
        ("value", problem.kv_len),
    ):
        grads[name] = problem.outward(grads[name][:, :length]).astype(dtype)
    if problem.bias is None:
        grads.pop("bias", None)
    else:
        bias = arguments["bias"]
        grad = grads["bias"][:, :, : problem.q_len, : problem.kv_len].astype(np.float64)
        grads["bias"] = truth.sum_to(grad, bias.shape).astype(bias.dtype)
    return grads


def _operands(problem, dtype):
    wide = np.float64 if dtype == np.float64 else np.float32
    visible, distance = problem.visible_everywhere()
    operands = {
        "query": _padded(problem.query.astype(dtype), 1),
        "key": _padded(problem.key.astype(dtype), 1),
        "value": _padded(problem.value.astype(dtype), 1),
        "mask": _padded(_padded(visible, 2), 3),
        "scale": wide(problem.scale),
    }
    bias = 0.0 if problem.bias is None else problem.bias
    if problem.slopes is not None:
        bias = bias - problem.slopes[None, :, None, None] * distance[:, None]
    if np.ndim(bias):
        operands["bias"] = _padded(_padded(bias.astype(wide), 2), 3)
    if problem.sinks is not None:
        operands["sinks"] = problem.sinks.astype(np.float32)
    if problem.softcap is not None:
        operands["logit_softcap"] = wide(problem.softcap)
    return operands


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
