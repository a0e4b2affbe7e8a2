"""The two oracles against each other: jax_flashattn._reference (jnp, differentiated by JAX) and
truth.py (numpy, by formula). Where both are in float64 they agree to rounding."""

import functools

import jax
import numpy as np
import pytest
import truth
from calls import gradients
from cases import Case, DecodeCase, make_cotangents, make_inputs

from jax_flashattn import _reference

F64 = functools.partial(Case, dtype="float64", q_len=19, head_dim=8)
CASES = [
    F64(),
    F64(causal=False, kv_len=31, value_dim=5),
    F64(kv_len=11),
    F64(kv_len=11, alignment="top_left", layout="BNTH"),
    F64(q_lengths=(7, 19), kv_lengths=(0, 12)),
    F64(q_lengths=(-1, 99), kv_lengths=(99, 12), sinks=True),
    F64(window=(3, 2), causal=False),
    F64(window=4, softcap=2.0, scale=0.7),
    F64(window=(None, 2), kv_len=31, alibi=True),
    F64(bias="BNTS", mask="__TS"),
    F64(bias="B__S", mask="BN_S", causal=False, sinks=True),
    F64(segments=4, causal=False),
    F64(segments=4, kv_len=23, sinks=True, softcap=5.0, window=(9, None), bias="_N_S"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case):
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    attention = functools.partial(_reference.attention, **case.options())
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        results = jax.jit(attention)(**arrays)
        grads = gradients(attention, arrays, dout, dlse)
    for ours, expected in zip(results, truth.attention(**arrays, **case.options()), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-13)
    expected = truth.gradients(dout, dlse, **arrays, **case.options())
    for name, grad in grads.items():
        rtol = 1e-11 if grad.dtype == np.float64 else 1e-6  # the sinks are float32
        np.testing.assert_allclose(grad, expected[name], rtol=rtol, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(),
        DecodeCase(lengths=(0, -4, 999, 3), tokens=5, layout="BNTH", sinks=True),
        DecodeCase(page_size=16, window=20, softcap=3.0, scale=0.2),
        DecodeCase(page_size=7, layout="BNTH", tokens=3, value_dim=16),
        DecodeCase(page_size=16, cache_dtype="float8_e4m3fn", scales="page"),
        DecodeCase(cache_dtype="int8"),
        DecodeCase(latent=True, value_dim=24, layout="BNTH"),
        DecodeCase(latent=True, value_dim=24, cache_dtype="int8"),
    ],
    ids=str,
)
def test_decode(case):
    arrays = make_inputs(case)
    with jax.default_device(jax.devices("cpu")[0]):
        decode = jax.jit(functools.partial(_reference.decode, **case.options()))
        out, lse = decode(**arrays)
    true_out, true_lse = truth.decode(**arrays, **case.options())
    np.testing.assert_allclose(out, true_out, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(lse, true_lse, atol=1e-4)


def test_nan_reaches_the_rows_that_see_it_in_truth():
    case = Case(q_len=9, dtype="float64")
    arrays = make_inputs(case)
    arrays["value"][0, 4, 1, 3] = np.nan
    arrays["key"][1, 2, 0, 0] = np.nan
    out, lse = truth.attention(**arrays)
    expected = np.zeros(out.shape, bool)
    expected[0, 4:, 2:, 3] = True  # heads 2 and 3 read key head 1
    expected[1, 2:, :2] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    np.testing.assert_array_equal(np.isnan(lse[1]), expected[1, ..., 0])
    assert np.isfinite(lse[0]).all()


def test_merge():
    case = Case(q_len=7, kv_len=12, causal=False)
    arrays = make_inputs(case)
    with jax.default_device(jax.devices("cpu")[0]):
        attention = jax.jit(functools.partial(_reference.attention, causal=False))
        whole = attention(**arrays)
        parts = [
            attention(arrays["query"], arrays["key"][:, part], arrays["value"][:, part])
            for part in (slice(0, 5), slice(5, 12), slice(0, 0))
        ]
        merged = jax.jit(_reference.merge)(*zip(*parts, strict=True))
    for ours, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
