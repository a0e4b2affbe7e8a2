"""The accuracy rule: how near to float64 truth a result has to be."""

import jax.numpy as jnp
import numpy as np


def check(ours, truth, xla, name="out"):
    """max|ours - truth| <= 2 * max|xla - truth| + 1 ulp * max|truth|.

    xla is the same maths at that dtype: one array, or a list of draws. inf and NaN have to stand
    where truth has them.
    """
    _check(ours, truth, xla, name, jnp.finfo(ours.dtype).eps)


def check_gradient(ours, truth, xla, name, dtype, lse):
    """The same rule for the gradient of a call of `dtype` with this lse.

    The ulp is the call's, also where the gradient is wider (of sinks). Besides, the backward pass
    computes p = exp(s - lse): the rounding of the stored lse is a relative error that XLA's own
    derivative does not have, and that shows in float32.
    """
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    largest = np.abs(lse[np.isfinite(lse)]).max(initial=0.0)
    _check(ours, truth, xla, name, jnp.finfo(dtype).eps + largest * jnp.finfo(wide).eps)


def _check(ours, truth, xla, name, ulp):
    draws = xla if isinstance(xla, list) else [xla]
    assert all(jnp.dtype(x.dtype) == ours.dtype for x in draws), name
    if ours.dtype == jnp.float64:
        ulp = 16 * ulp  # truth itself is no better than a few
    ours, truth, *draws = (np.asarray(x, np.float64) for x in (ours, truth, *draws))
    finite = _same_places(ours, truth, name)
    if not finite.any():
        return
    scale = np.abs(truth[finite]).max()
    allowed = 2 * max(np.abs(x[finite] - truth[finite]).max() for x in draws)
    allowed += float(ulp) * scale
    _within(allowed, finite, ours, truth, name)


def check_lse(ours, truth, name="lse"):
    """|ours - truth| <= 1e-4 + 1e-5 |truth| at every place."""
    ours, truth = np.asarray(ours, np.float64), np.asarray(truth, np.float64)
    finite = _same_places(ours, truth, name)
    _within(1e-4 + 1e-5 * np.abs(truth), finite, ours, truth, name)


def check_same(left, right, name="results"):
    """The same bits, NaNs included."""
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype, f"{name}: {left.dtype} and {right.dtype}"
    np.testing.assert_array_equal(left.astype(np.float64), right.astype(np.float64), err_msg=name)


def check_zero(x, where=None, name="gradient"):
    """Exactly zero (at the places `where`)."""
    x = np.asarray(x, np.float64)
    x = x if where is None else x[where]
    assert (x == 0).all(), f"{name}: {np.count_nonzero(x != 0)} of {x.size} values are not zero"


def _same_places(ours, truth, name):
    assert ours.shape == truth.shape, f"{name}: shape {ours.shape}, truth has {truth.shape}"
    for kind, test in (("nan", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(ours) != test(truth))
        assert not len(wrong), (
            f"{name}: {len(wrong)} places differ in {kind}, first at {tuple(map(int, wrong[0]))}: "
            f"ours {ours[tuple(wrong[0])]}, truth {truth[tuple(wrong[0])]}"
        )
    return np.isfinite(truth)


def _within(allowed, finite, ours, truth, name):
    ours, truth = ours[finite], truth[finite]
    allowed = np.broadcast_to(allowed, finite.shape)[finite]
    error = np.abs(ours - truth)
    if error.size and (error > allowed).any():
        i = (error - allowed).argmax()
        place = tuple(int(x) for x in np.argwhere(finite)[i])
        raise AssertionError(
            f"{name}: error {error[i]:.3e} at {place}, allowed {allowed[i]:.3e} "
            f"(ours {ours[i]:.6g}, truth {truth[i]:.6g})"
        )
