"""One call of an operation, held against truth: what most tests are made of."""

import contextlib
import functools

import jax
import pytest
import truth
import xla
from cases import make_cotangents, make_inputs
from check import check, check_gradient, check_lse

import jax_flashattn
from jax_flashattn import _ffi

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def check_prefill(platform, case, seed=0):
    case = platform.fit(case)
    arrays = make_inputs(case, seed)
    if refused(platform, "prefill", case):
        with pytest.raises(NotImplementedError, match="prefill: query has a head dim without"):
            prefill(case, arrays)
        return
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


def refused(platform, op, case) -> bool:
    """Whether the platform has no kernel for the head dim, and must say so."""
    if platform.name == "cpu":
        return False
    return max(case.head_dim, case.value_dim or 0) > _ffi.cuda().largest_head_dim()


def check_decode(platform, case, seed=0):
    case = platform.fit(case)
    arrays = make_inputs(case, seed)
    out, lse = decode(case, arrays)
    true_out, true_lse = truth.decode(**arrays, **case.options())
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


def check_gradients(platform, case, seed=0, lse=True, poison=True, **extra):
    """The gradients to every float operand of the case, of out and (with `lse`) of lse."""
    case = platform.fit(case)
    arrays = make_inputs(case, seed, poison)
    dout, dlse = make_cotangents(case, seed + 1)
    dlse = dlse if lse else None
    expected = truth.gradients(dout, dlse, **arrays, **case.options())
    _, lse = truth.attention(**arrays, **case.options())
    with precision(case):
        prefill = _static(jax_flashattn.prefill, case, return_lse=True, **extra)
        ours = gradients(prefill, arrays, dout, dlse)
    measure = xla.gradients(dout, dlse, **arrays, **case.options())
    for name in ours:
        check_gradient(ours[name], expected[name], measure[name], f"d{name}", case.dtype, lse)


def prefill(case, arrays, return_lse=True, **extra):
    with precision(case):
        return _static(jax_flashattn.prefill, case, return_lse=return_lse, **extra)(**arrays)


def xla_prefill(case, arrays):
    return xla.attention(**arrays, **case.options())


def decode(case, arrays, **extra):
    extra = {**case.launch_options(), **extra}
    return _static(jax_flashattn.decode, case, return_lse=True, **extra)(**arrays)


def xla_decode(case, arrays):
    return xla.decode(**arrays, **case.options())


def gradients(attention, arrays, dout, dlse):
    """The vjp of attention, by operand name. dlse None: the cotangent of lse is zero."""
    chosen = {name: arrays[name] for name in DIFFERENTIABLE if name in arrays}
    rest = {name: x for name, x in arrays.items() if name not in chosen}

    @jax.jit
    def pull(chosen, rest, dout, dlse):
        def run(chosen):
            out, lse = attention(**chosen, **rest)
            return (out, lse) if dlse is not None else out

        return jax.vjp(run, chosen)[1]((dout, dlse) if dlse is not None else dout)[0]

    return pull(chosen, rest, dout, dlse)


def precision(case):
    return jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext()


def _static(function, case, **extra):
    """The operation with the case's options bound, jitted; equal options share one function."""
    options = {**case.options(), **extra}
    return _bound(function, tuple(sorted(options.items())))


@functools.cache
def _bound(function, options):
    return jax.jit(functools.partial(function, **dict(options)))
