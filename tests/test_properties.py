"""Laws that hold for every call, tried on calls that hypothesis draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import truth
from calls import check_decode, check_gradients, check_prefill, decode, prefill, xla_prefill
from cases import SHORT_LENGTHS, Case, decode_cases, make_inputs, prefill_cases
from check import check, check_lse, check_same
from hypothesis import given
from hypothesis import strategies as st

import jax_flashattn


@given(case=prefill_cases(), seed=st.integers(0, 99))
def test_prefill(platform, case, seed):
    check_prefill(platform, case, seed)


@given(case=prefill_cases(lengths=SHORT_LENGTHS), seed=st.integers(0, 99))
def test_gradients(platform, case, seed):
    check_gradients(platform, case, seed)


@given(case=decode_cases(), seed=st.integers(0, 99))
def test_decode(platform, case, seed):
    check_decode(platform, case, seed)


@given(case=decode_cases(lengths=(33, 128, 257, 400)), splits=st.sampled_from((1, 2, 3, 5, 8, 13)))
def test_any_number_of_splits(platform, case, splits):
    """The cut changes rounding, never the answer."""
    check_decode(platform, case.replace(num_splits=splits))


@given(
    case=prefill_cases(
        causal=False,
        window=None,
        kv_lengths=None,
        sinks=False,
        q_lengths=None,
        lengths=SHORT_LENGTHS,
        layout="BTNH",
        mask=None,
        bias=None,
        segments=None,
        alibi=False,
    ),
    cut=st.floats(0, 1),
)
def test_halves_merged_by_lse_are_the_whole(platform, case, cut):
    case = platform.fit(case)
    arrays = make_inputs(case)
    middle = round(cut * case.keys)
    parts = [
        prefill(case, dict(arrays, key=arrays["key"][:, part], value=arrays["value"][:, part]))
        for part in (slice(0, middle), slice(middle, None))
    ]
    out, lse = jax_flashattn.merge(*zip(*parts, strict=True))
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, xla_prefill(case, arrays))
    check_lse(lse, true_lse)


@given(case=prefill_cases(lengths=SHORT_LENGTHS, layout="BTNH"))
def test_grouped_heads_are_repeated_heads(platform, case):
    case = platform.fit(case)
    arrays = make_inputs(case, poison=False)
    group = case.q_heads // case.kv_heads
    repeated = {n: np.repeat(arrays[n], group, axis=2) for n in ("key", "value")}
    grouped_out, grouped_lse = prefill(case, arrays)
    out, lse = prefill(case, dict(arrays, **repeated))
    true_out, _ = truth.attention(**arrays, **case.options())
    check(grouped_out, true_out, out)
    check_lse(grouped_lse, np.asarray(lse))


@given(case=prefill_cases(lengths=(1, 3, 16, 17, 33, 65)), size=st.integers(1, 3))
def test_vmap_is_a_loop(platform, case, size):
    """Every operand mapped, with an inner batch of its own."""
    case = platform.fit(case)
    calls = [make_inputs(case, seed=i) for i in range(size)]
    names = list(calls[0])
    call = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    outs, lses = jax.vmap(lambda *xs: call(**dict(zip(names, xs, strict=True))))(
        *(np.stack([c[n] for c in calls]) for n in names)
    )
    for i, arrays in enumerate(calls):
        true_out, true_lse = truth.attention(**arrays, **case.options())
        check(outs[i], true_out, prefill(case, arrays)[0])
        check_lse(lses[i], true_lse)


@given(
    case=prefill_cases(
        causal=True,
        kv_lengths=None,
        q_lengths=None,
        mask=None,
        bias=None,
        segments=None,
        layout="BTNH",
        batch=1,
    ),
    more=st.integers(1, 70),
)
def test_longer_causal_sequences_keep_their_rows(platform, case, more):
    """Top-left: rows do not depend on what comes later, NaN or not."""
    case = platform.fit(case.replace(alignment="top_left", kv_len=case.q_len, window=None, batch=1))
    arrays = make_inputs(case, poison=False)
    longer = dict(arrays)
    for name in ("query", "key", "value"):
        rest = np.full((1, more, *arrays[name].shape[2:]), np.nan, arrays[name].dtype)
        longer[name] = np.concatenate([arrays[name], rest], axis=1)
    out, lse = prefill(case, arrays)
    longer_out, longer_lse = prefill(case, longer)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(longer_out[:, : case.q_len], true_out, out)
    check_lse(longer_lse[:, : case.q_len], true_lse)
    assert np.isfinite(lse).all() and jnp.isnan(longer_out[:, case.q_len :]).all()


@given(
    case=prefill_cases(lengths=SHORT_LENGTHS, layout="BTNH", bias=None, mask=None, segments=None),
    padding=st.sampled_from((1, 15, 64, 100)),
)
def test_padding_does_nothing(platform, case, padding):
    """Arrays that are longer than their sequences, whatever the rest of them holds."""
    lengths = dict(q_lengths=(case.q_len,) * case.batch, kv_lengths=(case.keys,) * case.batch)
    case = platform.fit(case.replace(**lengths))
    arrays = make_inputs(case)
    padded = dict(arrays)
    for name in ("query", "key", "value"):
        x = arrays[name]
        rest = np.full((x.shape[0], padding, *x.shape[2:]), np.nan, x.dtype)
        padded[name] = np.concatenate([x, rest], axis=1)
    out, lse = prefill(case, padded)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out[:, : case.q_len], true_out, prefill(case, arrays)[0])
    check_lse(lse[:, : case.q_len], true_lse)
    assert not out[:, case.q_len :].any()
    assert (lse[:, case.q_len :] == -jnp.inf).all()


@given(case=prefill_cases(mask=None, segments=None, bias=None, sinks=False, alibi=False))
def test_skipped_tiles_equal_masked_tiles(platform, case):
    """Windows, causality and lengths by loop bounds, and all of them as one bool mask."""
    case = platform.fit(case)
    arrays = make_inputs(case)
    visible = truth.visible_keys(**arrays, **case.options())
    plain = case.replace(causal=False, window=None)
    masked = {n: arrays[n] for n in ("query", "key", "value")} | dict(mask=visible)
    out, lse = prefill(case, arrays)
    masked_out, masked_lse = prefill(plain, masked)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(out, true_out, masked_out)
    check(masked_out, true_out, out)
    check_lse(lse, true_lse)
    check_lse(masked_lse, true_lse)


@given(case=decode_cases(page_size=16, layout="BTNH"), seed=st.integers(0, 99))
def test_permuting_pages_does_nothing(platform, case, seed):
    case = platform.fit(case)
    arrays = make_inputs(case)
    pool = arrays["key_cache"].shape[0]
    order = np.random.default_rng(seed).permutation(pool)
    moved = dict(arrays)
    for name in ("key_cache", "value_cache"):
        moved[name] = np.empty_like(arrays[name])
        moved[name][order] = arrays[name]
    table = arrays["page_table"]
    used = table < pool
    moved["page_table"] = np.where(used, order[np.where(used, table, 0)], -1).astype(np.int32)
    for once, again in zip(decode(case, arrays), decode(case, moved), strict=True):
        check_same(again, once)


@given(case=prefill_cases(lengths=SHORT_LENGTHS), factor=st.sampled_from((0.5, 2.0, 4.0)))
def test_a_power_of_two_moves_between_scale_and_query(platform, case, factor):
    """scale * q . k: exact scaling of the query is exact scaling of the scores."""
    case = platform.fit(case.replace(scale=0.25, dtype="float32"))
    arrays = make_inputs(case)
    out, lse = prefill(case, arrays)
    scaled = dict(arrays, query=arrays["query"] * np.asarray(factor, arrays["query"].dtype))
    again, again_lse = prefill(case.replace(scale=0.25 / factor), scaled)
    true_out, true_lse = truth.attention(**arrays, **case.options())
    check(again, true_out, out)
    check_lse(again_lse, true_lse)
    check_lse(lse, true_lse)


@given(case=prefill_cases(lengths=SHORT_LENGTHS, bias=None, mask=None, sinks=False, alibi=False))
def test_outputs_stay_between_the_values(platform, case):
    """An average lies between the smallest and the largest of what it averages."""
    case = platform.fit(case)
    arrays = make_inputs(case, poison=False)
    out, _ = prefill(case, arrays)
    low, high = (float(f(arrays["value"].astype(np.float64))) for f in (np.min, np.max))
    slack = float(jnp.finfo(out.dtype).eps) * max(abs(low), abs(high))
    assert float(out.min()) >= min(low, 0) - slack and float(out.max()) <= max(high, 0) + slack


def test_case_names_are_short():
    assert str(Case(causal=False)) == "causal=False"
