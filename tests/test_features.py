"""Every feature in every direction, what is peculiar to one of them, and several combined."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import (
    check_decode,
    check_gradients,
    check_prefill,
    decode,
    gradients,
    precision,
    prefill,
    xla_prefill,
)
from cases import Case, make_cotangents, make_inputs
from check import check, check_gradient, check_lse, check_same
from features import DIRECTIONS, FEATURES, GROUPS, PAGE, page

import jax_flashattn
from jax_flashattn import _explain, _ffi

BASE = Case(q_len=97, head_dim=32)


def both(platform, case):
    check_prefill(platform, case)
    check_gradients(platform, case)


CALLS = [
    pytest.param(direction, feature, case, id=f"{direction}-{feature.name}-{case}")
    for feature in FEATURES
    for direction in DIRECTIONS
    for case in feature.calls(direction)
]


@pytest.mark.parametrize("direction,feature,case", CALLS)
def test_feature(platform, direction, feature, case):
    """What docs/features.md says: a right answer, or a refusal where explain has no kernel."""
    gpu = None if platform.name == "cpu" else _explain.gpu_facts()
    checks = dict(forward=check_prefill, gradients=check_gradients, decode=check_decode)
    with precision(case):
        if feature.explain(direction, case, gpu).kernel is not None:
            checks[direction](platform, case, **feature.extra)
            return
        with pytest.raises(NotImplementedError):
            call_once(direction, feature.on(gpu, case), feature.extra)


def call_once(direction, case, extra):
    arrays = make_inputs(case)
    if direction == "gradients":
        call = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options(), **extra)
        return gradients(call, arrays, *make_cotangents(case))
    return (decode if direction == "decode" else prefill)(case, arrays, **extra)


needs_cuda_kernels = pytest.mark.skipif(
    _ffi.cuda_problem is not None, reason="this build has no CUDA kernels"
)


@needs_cuda_kernels
def test_page():
    assert PAGE.read_text() == page(), "docs/features.md is out of date: python tests/features.py"


@needs_cuda_kernels
@pytest.mark.parametrize("feature", (*GROUPS["Shapes"], *GROUPS["Dtypes"]), ids=str)
@pytest.mark.parametrize("op,direction", [("prefill", "forward"), ("decode", "decode")])
def test_refused_where_explain_has_no_kernel(op, direction, feature):
    """Lowering for CUDA takes no GPU."""
    for case in feature.calls(direction):
        call = functools.partial(getattr(jax_flashattn, op), **case.options())
        refusal = contextlib.nullcontext()
        if feature.explain(direction, case, _explain.H200).kernel is None:
            refusal = pytest.raises(NotImplementedError, match=op)
        with precision(case):
            traced = jax.jit(call).trace(**make_inputs(feature.on(_explain.H200, case)))
            with refusal:
                traced.lower(lowering_platforms=("cuda",))


def test_window_does_not_read_other_tiles(platform):
    case = platform.fit(BASE.replace(batch=1, q_len=300, window=(20, 0)))
    arrays = make_inputs(case)
    arrays["key"][0, :64] = np.nan
    arrays["value"][0, :64] = np.nan
    out, _ = prefill(case, arrays)
    assert jnp.isfinite(out[0, 84:]).all()
    assert jnp.isnan(out[0, :64]).all()


@pytest.mark.parametrize("size", [-200.0, 200.0, -np.inf])
def test_extreme_sinks(platform, size):
    """A sink far below the scores does nothing, one far above takes everything."""
    case = platform.fit(BASE.replace(sinks=True))
    arrays = make_inputs(case)
    arrays["sinks"][...] = size
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays)
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)
    if size < 0:
        del arrays["sinks"]
        check(out, truth.attention(**arrays)[0], prefill(case.replace(sinks=False), arrays)[0])


def test_bias_of_one_number(platform):
    """Forward only: it moves lse alone, and its gradient is a sum in which all else cancels."""
    check_prefill(platform, BASE.replace(bias="____"))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bias_dtypes(platform, dtype):
    """A bias may have another dtype than the query; its gradient has the bias's."""
    case = platform.fit(BASE.replace(bias="_NTS"))
    arrays = make_inputs(case)
    arrays["bias"] = arrays["bias"].astype(jnp.dtype(dtype))
    dout, dlse = make_cotangents(case)
    out, _ = prefill(case, arrays)
    check(out, truth.attention(**arrays)[0], xla_prefill(case, arrays))
    call = functools.partial(jax_flashattn.prefill, return_lse=True)
    ours = gradients(call, arrays, dout, dlse)["bias"]
    assert ours.dtype == dtype
    expected = truth.gradients(dout, dlse, **arrays)["bias"]
    eps = max(float(jnp.finfo(t).eps) for t in (dtype, case.dtype))
    limit = 8 * eps * np.abs(expected).max()
    assert np.abs(np.asarray(ours, np.float64) - expected).max() <= limit


# What models add to the scores of masked keys. The least numbers overflow when multiplied by log2(e).
SOFT_MASKS = [
    ("float32", -1e9),
    ("bfloat16", float(jnp.finfo(jnp.bfloat16).min)),
    ("float32", float(jnp.finfo(jnp.float32).min)),
]


def softly_masked(platform, dtype, size):
    """Arrays with such a bias: all of row 0, half of row 1. And the same with a bias of 0 in row 0."""
    case = platform.fit(BASE.replace(causal=False, bias="__TS"))
    arrays = make_inputs(case)
    bias = np.zeros(arrays["bias"].shape, jnp.dtype(dtype))
    bias[..., 1, ::2] = size
    without = dict(arrays, bias=bias.copy())
    bias[..., 0, :] = size
    return case, dict(arrays, bias=bias), without


@pytest.mark.parametrize("dtype,size", SOFT_MASKS)
def test_soft_mask(platform, dtype, size):
    """It hides a key beside others; a row that has nothing else gives them all the same weight."""
    case, arrays, without = softly_masked(platform, dtype, size)
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**without, **case.options())
    draws = [draw[:, 1:] for draw in xla_prefill(case, without)]
    check(out[:, 1:], true_out[:, 1:], draws)
    check_lse(lse[:, 1:], true_lse[:, 1:])
    mean = np.asarray(arrays["value"], np.float64).mean(1)
    mean = np.repeat(mean, case.q_heads // case.kv_heads, 1)
    limit = 2 * float(jnp.finfo(case.dtype).eps) * np.abs(arrays["value"]).max()
    np.testing.assert_allclose(np.asarray(out[:, 0], np.float64), mean, rtol=0, atol=limit)
    assert np.isfinite(lse[:, 0]).all() and (np.asarray(lse[:, 0]) < -1e8).all()


@pytest.mark.parametrize("dtype,size", SOFT_MASKS)
def test_gradients_of_a_soft_mask(platform, dtype, size):
    """A padded row gets no cotangent and passes nothing on; with one it stays finite."""
    case, arrays, without = softly_masked(platform, dtype, size)
    call = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    dout, dlse = make_cotangents(case)
    assert all(np.isfinite(g).all() for g in gradients(call, arrays, dout, dlse).values())

    dout[:, 0], dlse[:, 0] = 0, 0
    ours = gradients(call, arrays, dout, dlse)
    expected = truth.gradients(dout, dlse, **without, **case.options())
    measure = xla.gradients(dout, dlse, **without, **case.options())
    _, lse = truth.attention(**without, **case.options())
    for name in ours:
        check_gradient(ours[name], expected[name], measure[name], name, case.dtype, lse)
    assert (np.asarray(ours["bias"])[..., 0, :] == 0).all()


def test_bias_of_lower_rank(platform):
    case = platform.fit(BASE.replace(bias="_NTS"))
    arrays = make_inputs(case)
    out, _ = prefill(case, arrays)
    check_same(prefill(case, dict(arrays, bias=arrays["bias"][0]))[0], out)


def test_minus_infinity_in_a_bias_is_a_mask(platform):
    case = platform.fit(BASE.replace(bias="BNTS"))
    arrays = make_inputs(case, poison=False)
    hidden = np.random.default_rng(9).random(arrays["bias"].shape) < 0.3
    hidden[0, :, 5] = True  # a row with nothing left
    arrays["bias"][hidden] = -np.inf
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays)
    assert np.isneginf(true_lse[0, 5]).all()
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)
    call = functools.partial(jax_flashattn.prefill, return_lse=True)
    dout, dlse = make_cotangents(case)
    for name, grad in gradients(call, arrays, dout, dlse).items():
        assert jnp.isfinite(grad).all(), name


def test_masks_that_hide_everything_or_nothing(platform):
    case = platform.fit(BASE.replace(mask="__TS"))
    arrays = make_inputs(case, poison=False)
    arrays["mask"][...] = True
    # A window that hides nothing keeps both calls on the same kernel where there are several.
    plain = prefill(
        case.replace(window=(1000, 0)), {n: x for n, x in arrays.items() if n != "mask"}
    )
    for a, b in zip(prefill(case, arrays), plain, strict=True):
        check_same(a, b)
    arrays["mask"][...] = False
    out, lse = prefill(case, arrays)
    assert not out.any() and (lse == -jnp.inf).all()


def test_masked_tiles(platform):
    """Whole tiles hidden, inside and at the edges."""
    case = platform.fit(BASE.replace(q_len=260, mask="__TS", causal=False))
    arrays = make_inputs(case, poison=False)
    arrays["mask"][...] = True
    arrays["mask"][..., 64:192] = False
    arrays["mask"][:, :, 128:200, :] = False
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, causal=False)
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


def test_segments_in_any_order(platform):
    """Ids need not be sorted, small or positive, and some match no key."""
    case = platform.fit(BASE.replace(segments=3, causal=False, kv_len=130))
    arrays = make_inputs(case, poison=False)
    ids = np.array([-(2**31), 2**31 - 1, 0, 7])
    rng = np.random.default_rng(4)
    arrays["query_segment_ids"] = ids[rng.integers(0, 4, (2, 97))].astype(np.int32)
    arrays["key_value_segment_ids"] = ids[rng.integers(0, 3, (2, 130))].astype(np.int32)
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, causal=False)
    assert np.isneginf(true_lse).any()
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


COMBINED = [
    dict(window=(30, None), softcap=10.0, sinks=True),
    dict(window=(50, 20), causal=False, alibi=True, mask="B__S"),
    dict(segments=3, window=(20, None), softcap=30.0, kv_lengths=(97, 50)),
    dict(segments=4, causal=False, bias="_NTS", sinks=True, layout="BNTH"),
    dict(bias="B__S", mask="__TS", softcap=5.0, q_lengths=(97, 13), kv_len=140),
    dict(alibi=True, sinks=True, mask="BNTS", kv_len=60, alignment="top_left"),
    dict(
        window=(60, 10),
        causal=False,
        softcap=8.0,
        sinks=True,
        alibi=True,
        bias="BNTS",
        mask="_NTS",
        segments=2,
        q_lengths=(90, 97),
        kv_lengths=(97, 70),
        scale=0.4,
    ),
]


@pytest.mark.parametrize("features", COMBINED, ids=lambda f: "-".join(f))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_combined(platform, features, dtype):
    both(platform, BASE.replace(dtype=dtype, **features))


@pytest.mark.parametrize("features", COMBINED[:4], ids=lambda f: "-".join(f))
def test_combined_deterministic(platform, features):
    case = platform.fit(BASE.replace(**features))
    arrays = make_inputs(case)
    cotangents = make_cotangents(case)
    call = functools.partial(
        jax_flashattn.prefill, return_lse=True, deterministic=True, **case.options()
    )
    first = gradients(call, arrays, *cotangents)
    again = gradients(call, arrays, *cotangents)
    for name in first:
        check_same(again[name], first[name], name)


def test_no_score_matrix(platform):
    """No buffer of T x S in the program, forward or backward; (B, 1, 1, S) is not expanded."""
    length = 2048
    heads = dict(q_heads=1, kv_heads=1)
    case = platform.fit(Case(batch=1, q_len=length, mask="B__S", bias="B__S", **heads))
    arrays = make_inputs(case)

    def loss(q):
        return jax_flashattn.prefill(**dict(arrays, query=q)).astype(jnp.float32).sum()

    lowered = jax.jit(jax.value_and_grad(loss)).lower(arrays["query"])
    assert lowered.compile().memory_analysis().temp_size_in_bytes < length * length // 2
