"""segment_ids: packed documents are as if each were alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import gradients, prefill, xla_prefill
from cases import Case, make_cotangents, make_inputs
from check import check, check_gradient, check_lse, check_same, check_zero

import jax_flashattn
from jax_flashattn import segment_ids

LENGTHS = (0, 40, 17, 0, 0, 64, 1, 0)  # of documents
OTHERS = (9, 70, 0, 3, 0, 65, 33, 0)  # of what their queries may look at
TAIL = 11


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def packed(platform, kv_lengths, causal, tail=TAIL):
    """A call without a batch axis, what is behind the documents NaN, and the offsets of both sides."""
    q_len, kv_len = sum(LENGTHS) + tail, sum(kv_lengths) + tail
    case = platform.fit(Case(batch=1, q_len=q_len, kv_len=kv_len, causal=causal))
    arrays = {n: x[0] for n, x in make_inputs(case, poison=False).items()}
    for name, lengths in (("query", LENGTHS), ("key", kv_lengths), ("value", kv_lengths)):
        arrays[name][sum(lengths) :] = np.nan
    return case, arrays, offsets(LENGTHS), offsets(kv_lengths)


def documents(arrays, cu_q, cu_kv):
    """(rows of queries, rows of keys, a call of its own with batch 1) of each that has both."""
    for d in range(len(cu_q) - 1):
        q, kv = slice(cu_q[d], cu_q[d + 1]), slice(cu_kv[d], cu_kv[d + 1])
        alone = {n: arrays[n][None, q if n == "query" else kv] for n in ("query", "key", "value")}
        if alone["query"].size and alone["key"].size:
            yield q, kv, alone


@pytest.mark.parametrize("kv_lengths,causal", [(LENGTHS, True), (LENGTHS, False), (OTHERS, False)])
def test_equals_separate_calls(platform, kv_lengths, causal):
    case, arrays, cu_q, cu_kv = packed(platform, kv_lengths, causal)
    ids = segment_ids(cu_q, case.q_len, cu_kv, case.keys)
    out, lse = prefill(case, arrays | ids)
    seen = np.zeros(case.q_len, bool)
    for q, _, alone in documents(arrays, cu_q, cu_kv):
        true_out, true_lse = truth.attention(**alone, causal=causal)
        check(out[None, q], true_out, xla_prefill(case, alone))
        check_lse(lse[None, q], true_lse)
        seen[q] = True
    check_zero(out, ~seen)  # no key in the document, or none of a document
    assert (np.asarray(lse)[~seen] == -np.inf).all() and (~seen).sum() >= TAIL


@pytest.mark.parametrize("kv_lengths,causal", [(LENGTHS, True), (OTHERS, False)])
def test_gradients_equal_those_of_separate_calls(platform, kv_lengths, causal):
    case, arrays, cu_q, cu_kv = packed(platform, kv_lengths, causal)
    dout, dlse = (x[0] for x in make_cotangents(case))
    call = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    ids = segment_ids(cu_q, case.q_len, cu_kv, case.keys)
    grads = gradients(call, arrays | ids, dout, dlse)
    untouched = {name: np.ones(len(arrays[name]), bool) for name in grads}
    for q, kv, alone in documents(arrays, cu_q, cu_kv):
        cotangents = dout[None, q], dlse[None, q]
        expected = truth.gradients(*cotangents, **alone, causal=causal)
        measure = xla.gradients(*cotangents, **alone, causal=causal)
        _, true_lse = truth.attention(**alone, causal=causal)
        for name, grad in grads.items():
            rows = q if name == "query" else kv
            mine = grad[None, rows]
            check_gradient(mine, expected[name], measure[name], name, case.dtype, true_lse)
            untouched[name][rows] = False
    for name, rows in untouched.items():
        check_zero(grads[name], rows, name)


def test_offsets_may_be_traced(platform):
    """One program for all ways to cut the same tokens into as many documents."""
    case, arrays, _, _ = packed(platform, LENGTHS, True, tail=0)
    call = functools.partial(jax_flashattn.prefill, **arrays)
    run = jax.jit(lambda cu: call(**segment_ids(cu, case.q_len)))
    rng = np.random.default_rng(0)
    for _ in range(3):
        cu = offsets(np.diff(np.sort(rng.integers(0, case.q_len, len(LENGTHS) + 1))))
        check_same(run(cu), call(**segment_ids(cu, case.q_len)))
    assert run._cache_size() == 1


def test_vmap(platform):
    """A batch of packed sequences, each cut in its own way."""
    case = platform.fit(Case(batch=3, q_len=90))
    arrays = make_inputs(case)
    cuts = np.int32([[0, 30, 90], [0, 0, 50], [0, 89, 90]])
    ids = jax.vmap(lambda cu: segment_ids(cu, case.q_len))(cuts)
    together, _ = prefill(case, arrays | ids)
    for b, cu in enumerate(cuts):
        one = {name: x[b] for name, x in arrays.items()}
        alone, _ = prefill(case, one | segment_ids(cu, case.q_len))
        check_same(together[b], alone)


def test_ids():
    """Sorted; the queries behind the last document match no key, nor do such keys a query."""
    ids = segment_ids(jnp.array([0, 2, 2, 3]), 5, jnp.array([0, 0, 1, 4]), 6)
    np.testing.assert_array_equal(ids["query_segment_ids"], [0, 0, 2, 3, 3])
    np.testing.assert_array_equal(ids["key_value_segment_ids"], [1, 2, 2, 2, 4, 4])
    np.testing.assert_array_equal(segment_ids([0], 2)["query_segment_ids"], [0, 0])
    np.testing.assert_array_equal(segment_ids([0], 2)["key_value_segment_ids"], [1, 1])
    for end in (9, 2**33):
        np.testing.assert_array_equal(segment_ids([0, end], 2)["key_value_segment_ids"], [0, 0])


def test_memory_does_not_grow_with_the_documents():
    """10 000 documents of one token each: nothing of documents x tokens."""
    length = 10_000
    run = jax.jit(lambda cu: segment_ids(cu, length))
    compiled = run.lower(jax.ShapeDtypeStruct((length + 1,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * length


@pytest.mark.parametrize(
    "error,arguments",
    [
        (TypeError, ([0.0, 2.0], 4)),
        (ValueError, (np.int32(0), 4)),
        (ValueError, (np.zeros(0, np.int32), 4)),
        (ValueError, ([0, 2], 4, [0, 2], None)),
        (ValueError, ([0, 2], 4, None, 4)),
        (ValueError, ([0, 2], 4, [0, 1, 2], 4)),
    ],
)
def test_errors(error, arguments):
    with pytest.raises(error, match="segment_ids: cu_seqlens"):
        segment_ids(*arguments)
