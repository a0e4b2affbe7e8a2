"""prefill, forward: shapes, dtypes, layouts, lengths, and answers that must be exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
from calls import check_prefill, prefill, xla_prefill
from cases import LENGTHS, LONG_LENGTHS, Case, make_inputs
from check import check, check_lse, check_same, check_zero

import jax_flashattn

DTYPES = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("q_len", LENGTHS + LONG_LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(platform, q_len, causal):
    check_prefill(platform, Case(batch=1, q_len=q_len, q_heads=2, kv_heads=1, causal=causal))


@pytest.mark.parametrize("kv_len", [1, 16, 63, 129, 257])
@pytest.mark.parametrize("q_len", [1, 17, 128])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_cross_lengths(platform, q_len, kv_len, alignment):
    check_prefill(platform, Case(q_len=q_len, kv_len=kv_len, alignment=alignment))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes(platform, dtype, layout, causal):
    check_prefill(platform, Case(q_len=97, dtype=dtype, layout=layout, causal=causal))


@pytest.mark.parametrize("head_dim", [1, 7, 8, 24, 40, 64, 72, 80, 96, 128, 160, 192, 256, 512])
def test_head_dims(platform, head_dim):
    check_prefill(platform, Case(q_len=70, head_dim=head_dim))


@pytest.mark.parametrize(
    "head_dim,value_dim", [(192, 128), (128, 64), (64, 128), (576, 512), (40, 8)]
)
def test_value_dims(platform, head_dim, value_dim):
    check_prefill(platform, Case(q_len=35, head_dim=head_dim, value_dim=value_dim, kv_heads=1))


@pytest.mark.parametrize("q_heads,kv_heads", [(1, 1), (8, 8), (8, 4), (6, 2), (5, 1), (71, 1)])
def test_head_ratios(platform, q_heads, kv_heads):
    check_prefill(platform, Case(q_len=40, q_heads=q_heads, kv_heads=kv_heads))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(
    "q_lengths,kv_lengths",
    [
        ((0, 1, 64, 80), None),
        (None, (0, 1, 64, 80)),
        ((80, 17, 80, 3), (3, 80, 64, 0)),
        ((-7, 1000, 80, 65), (80, 2**31 - 1, -(2**31), 65)),
    ],
)
def test_ragged(platform, causal, alignment, q_lengths, kv_lengths):
    check_prefill(
        platform,
        Case(
            batch=4,
            q_len=80,
            causal=causal,
            alignment=alignment,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
        ),
    )


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_lengths_of_any_integer_dtype(platform, dtype, x64):
    """Clamped as the numbers they are, also those that int32 does not hold."""
    limits = np.iinfo(dtype)
    case = platform.fit(Case(batch=4, q_lengths=(5, 65, 0, 65), kv_lengths=(65, 7, 65, 0)))
    arrays = make_inputs(case)
    wide = {
        "query_seq_lengths": np.array([5, limits.max, limits.min, limits.max], dtype),
        "key_value_seq_lengths": np.array([limits.max, 7, limits.max, limits.min], dtype),
    }
    with jax.enable_x64(x64):
        results = jax_flashattn.prefill(**arrays | wide, return_lse=True)
    for a, b in zip(results, prefill(case, arrays), strict=True):
        check_same(a, b)


@pytest.mark.parametrize("axis", ["B", "T", "S"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("segments", [None, 3])
def test_zero_sizes(platform, axis, layout, segments):
    sizes = dict(B=dict(batch=0), T=dict(q_len=0, kv_len=5), S=dict(q_len=5, kv_len=0))[axis]
    case = platform.fit(Case(**sizes, layout=layout, segments=segments))
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    expected, true_lse = truth.attention(**arrays, **case.options())
    assert out.shape == expected.shape and out.dtype == arrays["query"].dtype
    check_zero(out)
    np.testing.assert_array_equal(lse, true_lse)


def test_many_heads(platform):
    """batch * heads beyond the 65535 of a CUDA grid's second axis."""
    case = Case(batch=8200, q_len=2, q_heads=8, kv_heads=8, head_dim=8, dtype="float16")
    arrays = make_inputs(case, poison=False)
    out, lse = prefill(case, arrays)
    some = slice(8190, None)
    last = {name: x[some] for name, x in arrays.items()}
    true_out, true_lse = truth.attention(**last)
    check(out[some], true_out, xla_prefill(case, last))
    check_lse(lse[some], true_lse)
    assert jnp.isfinite(out).all()


def test_leading_axes(platform):
    """Axes beyond one batch axis are folded; rank 3 has none."""
    case = platform.fit(Case(batch=6, q_len=20))
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    folded = {name: x.reshape(2, 3, *x.shape[1:]) for name, x in arrays.items()}
    many_out, many_lse = jax_flashattn.prefill(**folded, return_lse=True)
    check_same(many_out, out.reshape(2, 3, *out.shape[1:]))
    check_same(many_lse, lse.reshape(2, 3, *lse.shape[1:]))
    one_out, one_lse = jax_flashattn.prefill(*(x[0] for x in arrays.values()), return_lse=True)
    check_same(one_out, out[0])
    check_same(one_lse, lse[0])


def test_a_hundred_thousand_keys(platform):
    """Errors of long sums do not add up."""
    check_prefill(
        platform,
        Case(batch=1, q_len=8, kv_len=100_000, q_heads=1, kv_heads=1, head_dim=16, causal=False),
    )


def test_arguments(platform):
    """The positional form, the default scale, a NumPy and a traced scale, no lse."""
    case = platform.fit(Case(q_len=33, head_dim=64))
    q, k, v = make_inputs(case).values()
    out, _ = prefill(case, dict(query=q, key=k, value=v))
    for same in (
        jax_flashattn.prefill(q, k, v),
        jax_flashattn.prefill(q, k, v, True, 0.125),
        jax_flashattn.prefill(q, k, v, scale=np.float64(0.125)),
        jax.jit(lambda scale: jax_flashattn.prefill(q, k, v, scale=scale))(jnp.float32(0.125)),
    ):
        check_same(same, out)
    full = prefill(case.replace(causal=False), dict(query=q, key=k, value=v))[0]
    check_same(jax_flashattn.prefill(q, k, v, False), full)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_traced_scale_of_any_dtype(platform, dtype):
    """It is the scale that is narrow, not the query."""
    case = platform.fit(Case(q_len=50, scale=2.0))
    arrays = make_inputs(case)
    out = jax.jit(lambda scale: jax_flashattn.prefill(**arrays, scale=scale))(jnp.array(2, dtype))
    check(out, truth.attention(**arrays, **case.options())[0], xla_prefill(case, arrays))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0, 1e-4])
def test_scales(platform, scale):
    check_prefill(platform, Case(q_len=50, scale=scale))


def test_layouts_agree(platform):
    case = platform.fit(Case(q_len=81, q_lengths=(81, 40), kv_lengths=(60, 81)))
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    for name in ("query", "key", "value"):
        arrays[name] = arrays[name].swapaxes(1, 2)
    heads_first, heads_first_lse = prefill(case.replace(layout="BNTH"), arrays)
    check_same(heads_first.swapaxes(1, 2), out)
    check_same(heads_first_lse.swapaxes(1, 2), lse)


# --- answers known without computing


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_constant_values_come_back(platform, dtype, causal):
    """Any average of one number is that number, to the bit."""
    case = platform.fit(Case(q_len=129, kv_len=200, dtype=dtype, causal=causal, head_dim=64))
    arrays = make_inputs(case)
    arrays["value"][...] = np.asarray(1.5, arrays["value"].dtype)
    out, _ = prefill(case, arrays)
    check_same(out, np.full_like(out, 1.5))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_hot_rows_select_a_value(platform, dtype):
    """Query i matches key order[i] and no other: the output is that key's value, to the bit."""
    length = dim = 64
    order = np.random.default_rng(0).permutation(length)
    case = platform.fit(
        Case(batch=1, q_len=length, q_heads=1, kv_heads=1, dtype=dtype, head_dim=dim)
    )
    value = make_inputs(case)["value"]
    key = np.eye(length, dtype=value.dtype)[None, :, None, :]
    query = 256 * key[:, order]
    out = jax_flashattn.prefill(query, key, value, causal=False, scale=1.0)
    check_same(out, value[:, order])


def test_equal_scores_average(platform):
    """With all scores equal the output is the mean of V and lse is log of the number of keys."""
    case = platform.fit(Case(q_len=64, head_dim=16))
    arrays = make_inputs(case)
    arrays["query"][...] = np.zeros((), arrays["query"].dtype)
    counts = np.arange(1, 65)
    arrays["value"][...] = np.arange(64, dtype=arrays["value"].dtype)[None, :, None, None]
    out, lse = prefill(case, arrays)
    np.testing.assert_allclose(
        lse, np.broadcast_to(np.log(counts)[None, :, None], lse.shape), rtol=1e-6
    )
    expected = ((counts - 1) / 2)[None, :, None, None]
    tolerance = 2 * float(jnp.finfo(out.dtype).eps) * 31.5
    np.testing.assert_allclose(np.asarray(out, np.float64) - expected, 0, atol=tolerance)


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_extreme_scores(platform, size):
    """Scores far beyond the range of exp, in both directions."""
    case = platform.fit(Case(q_len=100, kv_len=130, scale=1.0, head_dim=8))
    arrays = make_inputs(case)
    arrays["query"] = (arrays["query"] * size).astype(arrays["query"].dtype)
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    assert np.abs(true_lse).max() > 88
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [3.0, 60.0, 1000.0])
def test_scores_of_one_sign_that_grow_along_the_keys(platform, size, sign, head_dim, causal):
    """Each block of keys exceeds the one behind it, positive or negative; the other way round too."""
    case = Case(
        batch=1, q_len=130, kv_len=1100, q_heads=2, kv_heads=1, head_dim=head_dim, causal=causal,
        dtype="bfloat16",
    )  # fmt: skip
    arrays = make_inputs(case)
    key, query = arrays["key"], arrays["query"]
    grow = np.linspace(size, 1, 1100)[:, None, None]
    for factor in (grow, grow[::-1]):
        arrays["key"] = (sign * np.abs(key.astype(np.float32)) * factor).astype(key.dtype)
        arrays["query"] = np.abs(query)
        out, lse = prefill(case, arrays)
        true_out, true_lse = truth.attention(**arrays, **case.options())
        check(out, true_out, xla_prefill(case, arrays))
        check_lse(lse, true_lse)


def test_infinite_scores_are_nan_where_they_are_seen(platform):
    """Keys of inf: inf - inf in the softmax of the rows that see them, nothing elsewhere."""
    case = platform.fit(Case(batch=1, q_len=40, q_heads=1, kv_heads=1))
    arrays = make_inputs(case)
    arrays["query"] = np.abs(arrays["query"]) + np.ones((), arrays["query"].dtype)
    arrays["key"][0, 25] = np.inf
    out, _ = prefill(case, arrays)
    assert jnp.isfinite(out[0, :25]).all()
    assert jnp.isnan(out[0, 25:]).all()


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("causal", [True, False])
def test_nan_reaches_exactly_the_rows_that_see_it(platform, name, causal):
    case = platform.fit(Case(q_len=150, causal=causal))
    arrays = make_inputs(case)
    measure = xla_prefill(case, arrays)  # without the NaN: XLA's products would spread it
    arrays[name][0, 70, 1, 5] = np.nan
    out, lse = prefill(case, arrays)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, measure)
    check_lse(lse, true_lse)


def test_repeats_bitwise(platform):
    case = platform.fit(Case(batch=3, q_len=257, kv_lengths=(257, 100, 3)))
    arrays = make_inputs(case)
    first = prefill(case, arrays)
    for _ in range(3):
        for again, once in zip(prefill(case, arrays), first, strict=True):
            check_same(again, once)


@pytest.mark.parametrize(
    "case",
    [
        Case(q_len=257),
        Case(q_len=200, kv_len=100, causal=False, head_dim=256, layout="BNTH"),
        Case(q_len=70, head_dim=40, kv_lengths=(0, 70)),
        Case(q_len=33, sinks=True, softcap=5.0),
        Case(q_len=8, kv_len=0, sinks=True),
    ],
    ids=str,
)
def test_without_lse(platform, case):
    case = platform.fit(case)
    arrays = make_inputs(case)
    out, _ = prefill(case, arrays)
    check_same(prefill(case, arrays, return_lse=False), out)


def test_skipped_tiles_change_no_bit(platform):
    """Causal by loop bounds, and causal by a mask over every tile, are the same numbers."""
    case = platform.fit(Case(q_len=193))
    arrays = make_inputs(case)
    # A window that hides nothing keeps both calls on the same kernel where there are several.
    out, lse = prefill(case.replace(window=(1000, 0)), arrays)
    mask = np.tri(193, dtype=bool)[None, None]
    masked_out, masked_lse = prefill(case.replace(causal=False), dict(arrays, mask=mask))
    check_same(masked_out, out)
    check_same(masked_lse, lse)


@pytest.mark.parametrize("q_len", [128, 512, 1024])
def test_error_of_the_fp16_setting(platform, q_len):
    """The promise for fp16, H 64: the largest error stays under 2.44e-4."""
    case = Case(batch=1, q_len=q_len, q_heads=2, kv_heads=2, head_dim=64, dtype="float16")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, q_len, 2, 64)).astype(np.float16) for _ in range(3))
    arrays = dict(query=q, key=k, value=v * np.float16(0.25))
    out, _ = prefill(case, arrays)
    true_out, _ = truth.attention(**arrays)
    assert np.abs(np.asarray(out, np.float64) - true_out).max() < 2.44e-4
