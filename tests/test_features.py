"""Windows, soft cap, sinks, ALiBi, bias, masks, segments: alone and combined, both directions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
from calls import check_gradients, check_prefill, gradients, prefill, xla_prefill
from cases import Case, make_cotangents, make_inputs
from check import check, check_lse, check_same

import jax_flashattn

BASE = Case(q_len=97, head_dim=32)


def both(platform, case):
    check_prefill(platform, case)
    check_gradients(platform, case)


@pytest.mark.parametrize(
    "window",
    [0, 1, 16, 64, 1000, (5, None), (None, 7), (0, 0), (70, 3), (3, 70), (None, None)],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_windows(platform, window, causal):
    both(platform, BASE.replace(window=window, causal=causal))


@pytest.mark.parametrize("window", [(30, 10), 64])
@pytest.mark.parametrize("q_len,kv_len", [(65, 200), (200, 65)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_windows_with_cross_lengths(platform, window, q_len, kv_len, alignment):
    lengths = dict(q_len=q_len, kv_len=kv_len, kv_lengths=(kv_len, kv_len // 2))
    both(platform, BASE.replace(window=window, causal=False, alignment=alignment, **lengths))


def test_window_leaves_rows_empty(platform):
    """Top-left windows of queries past the keys see nothing."""
    both(platform, BASE.replace(kv_len=20, window=(4, 4), alignment="top_left", causal=False))


def test_window_does_not_read_other_tiles(platform):
    case = platform.fit(BASE.replace(batch=1, q_len=300, window=(20, 0)))
    arrays = make_inputs(case)
    arrays["key"][0, :64] = np.nan
    arrays["value"][0, :64] = np.nan
    out, _ = prefill(case, arrays)
    assert jnp.isfinite(out[0, 84:]).all()
    assert jnp.isnan(out[0, :64]).all()


@pytest.mark.parametrize("softcap", [0.5, 20.0, 50.0])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_softcap(platform, softcap, scale):
    both(platform, BASE.replace(softcap=softcap, scale=scale))


@pytest.mark.parametrize("kv_lengths", [None, (0, 60)])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_sinks(platform, kv_lengths, layout):
    both(platform, BASE.replace(sinks=True, kv_lengths=kv_lengths, layout=layout))


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


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi(platform, causal, alignment):
    case = BASE.replace(alibi=True, causal=causal, alignment=alignment, kv_len=130)
    both(platform, case)
    both(platform, case.replace(kv_lengths=(130, 50), q_lengths=(60, 97)))


@pytest.mark.parametrize("bias", ["BNTS", "_NTS", "B_TS", "__TS", "B__S", "___S", "BN_S", "BNT_"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_bias(platform, bias, layout):
    both(platform, BASE.replace(bias=bias, layout=layout))


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


@pytest.mark.parametrize("mask", ["BNTS", "_NTS", "__TS", "B__S", "___S", "BN_S", "B_T_"])
@pytest.mark.parametrize("causal", [True, False])
def test_mask(platform, mask, causal):
    both(platform, BASE.replace(mask=mask, causal=causal))


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


@pytest.mark.parametrize("segments", [1, 2, 5, 60])
@pytest.mark.parametrize("causal", [True, False])
def test_segments(platform, segments, causal):
    both(platform, BASE.replace(segments=segments, causal=causal))


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


def test_packed_documents_equal_separate_calls(platform):
    """Segments are what keeps packed documents apart: each is as if it were alone."""
    lengths = (1, 40, 17, 0, 64, 8)
    case = platform.fit(BASE.replace(batch=1, q_len=sum(lengths), segments=1))
    arrays = make_inputs(case, poison=False)
    ids = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)
    arrays["query_segment_ids"] = arrays["key_value_segment_ids"] = ids
    out, lse = prefill(case, arrays)
    for document in range(len(lengths)):
        mine = ids[0] == document
        alone = {n: arrays[n][:, mine] for n in ("query", "key", "value")}
        true_out, true_lse = truth.attention(**alone)
        if mine.any():
            check(out[:, mine], true_out, xla_prefill(case, alone))
            check_lse(lse[:, mine], true_lse)


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
