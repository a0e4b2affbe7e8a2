"""Derivatives of prefill, in every mode, against formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import (
    DIFFERENTIABLE,
    check_gradients,
    gradients,
    precision,
)
from cases import Case, make_cotangents, make_inputs
from check import check, check_gradient, check_same, check_zero

import jax_flashattn
from jax_flashattn import _reference


@pytest.mark.parametrize("q_len", [1, 2, 17, 63, 64, 65, 127, 128, 129, 193, 257])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(platform, q_len, causal):
    check_gradients(platform, Case(batch=1, q_len=q_len, q_heads=2, kv_heads=1, causal=causal))


@pytest.mark.parametrize("q_len,kv_len", [(1, 130), (130, 1), (65, 129), (129, 65), (17, 16)])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_cross_lengths(platform, q_len, kv_len, alignment):
    """S < T leaves empty rows."""
    check_gradients(platform, Case(q_len=q_len, kv_len=kv_len, alignment=alignment))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_dtypes(platform, dtype, layout):
    check_gradients(platform, Case(q_len=97, dtype=dtype, layout=layout))


@pytest.mark.parametrize(
    "head_dim,value_dim",
    [(8, 8), (5, 5), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (64, 128)]
    + [(264, 264), (512, 512), (576, 512), (320, 40), (72, 328)],
)
def test_head_dims(platform, head_dim, value_dim):
    check_gradients(platform, Case(q_len=66, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("q_heads,kv_heads", [(1, 1), (6, 6), (6, 2), (5, 1), (17, 1)])
def test_head_ratios(platform, q_heads, kv_heads):
    check_gradients(platform, Case(q_len=40, q_heads=q_heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "head_dim,causal,kv_lengths",
    [(64, True, None), (128, False, None), (128, True, (130, 0, 1, 129))],
)
def test_many_heads(platform, head_dim, causal, kv_lengths):
    """More than a GPU works on at a time: kernels that pass on what others have made ready."""
    heads = dict(batch=16, q_heads=10, kv_heads=10, head_dim=head_dim)
    lengths = dict(q_len=70, kv_len=130, kv_lengths=kv_lengths and kv_lengths * 4)
    check_gradients(platform, Case(causal=causal, **heads, **lengths))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "q_lengths,kv_lengths",
    [(None, (0, 1, 64, 70)), ((0, 1, 64, 70), None), ((70, 17, -3, 70), (3, 999, 64, 0))],
)
def test_ragged(platform, causal, q_lengths, kv_lengths):
    lengths = dict(q_lengths=q_lengths, kv_lengths=kv_lengths)
    check_gradients(platform, Case(batch=4, q_len=70, causal=causal, **lengths))


@pytest.mark.parametrize("lse", [False, True])
def test_cotangents_of_out_and_lse(platform, lse):
    check_gradients(platform, Case(q_len=80), lse=lse)


def test_gradient_of_lse_alone(platform):
    """Its gradient to the value is exactly zero."""
    case = platform.fit(Case(q_len=60))
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    expected = truth.gradients(np.zeros_like(dout), dlse, **arrays)
    _, true_lse = truth.attention(**arrays)

    measure = xla.gradients(np.zeros_like(dout), dlse, **arrays)

    def lse(q, k, v):
        return jax_flashattn.prefill(q, k, v, return_lse=True)[1]

    ours = jax.vjp(lse, *arrays.values())[1](jnp.asarray(dlse))
    for name, grad in zip(arrays, ours, strict=True):
        check_gradient(grad, expected[name], measure[name], name, case.dtype, true_lse)
    check_zero(ours[2])


def test_scales(platform):
    for scale in (0.0, -0.3, 1.0):
        check_gradients(platform, Case(q_len=40, scale=scale))


def test_masked_positions_get_exactly_zero(platform):
    """make_inputs puts NaN wherever nobody looks; there the gradient is zero, not NaN."""
    case = platform.fit(Case(q_len=90, q_lengths=(50, 90), kv_lengths=(90, 30), mask="B__S"))
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    assert all(np.isnan(arrays[x].astype(np.float64)).any() for x in ("query", "key", "value"))
    prefill = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    grads = gradients(prefill, arrays, dout, dlse)
    for name in ("query", "key", "value"):
        unread = np.isnan(arrays[name].astype(np.float64))
        check_zero(grads[name], unread, name)
        assert np.isfinite(grads[name]).all(), name


def test_empty_rows_pass_nothing_on(platform):
    """No key visible anywhere: all gradients are zero, whatever the cotangents."""
    case = platform.fit(Case(q_len=40, kv_lengths=(0, 0)))
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    prefill = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    for name, grad in gradients(prefill, arrays, dout, dlse).items():
        check_zero(grad, name=name)


@pytest.mark.parametrize("segments", [None, 3])
@pytest.mark.parametrize("q_len,kv_len", [(20, 300), (300, 20)])
def test_tiles_that_see_nothing(platform, q_len, kv_len, segments):
    """Keys before every window, and queries before the first key, between tiles that see some."""
    case = Case(q_len=q_len, kv_len=kv_len, window=(30, 0), segments=segments)
    check_gradients(platform, case)


@pytest.mark.parametrize("axis", ["B", "T", "S"])
def test_zero_sizes(platform, axis):
    sizes = dict(B=dict(batch=0), T=dict(q_len=0, kv_len=5), S=dict(q_len=5, kv_len=0))[axis]
    case = platform.fit(Case(**sizes))
    arrays = make_inputs(case)
    prefill = functools.partial(jax_flashattn.prefill, return_lse=True, **case.options())
    for name, grad in gradients(prefill, arrays, *make_cotangents(case)).items():
        assert grad.shape == arrays[name].shape
        check_zero(grad, name=name)


def test_one_key(platform):
    """A softmax over one key has no slope: dq and dk vanish, dv is the cotangent."""
    case = platform.fit(Case(batch=1, q_len=1, q_heads=1, kv_heads=1))
    arrays = make_inputs(case)
    dout, _ = make_cotangents(case)
    prefill = functools.partial(jax_flashattn.prefill, return_lse=True)
    grads = gradients(prefill, arrays, dout, None)
    tiny = 4 * float(jnp.finfo(dout.dtype).eps)
    np.testing.assert_allclose(grads["value"], dout, rtol=tiny if dout.dtype == np.float32 else 0)
    for name in ("query", "key"):
        assert np.abs(np.asarray(grads[name], np.float64)).max() <= tiny, name


@pytest.mark.parametrize("size", [30.0, 120.0])
def test_extreme_scores(platform, size):
    """lse far above 88 and far below -88: exp must never be taken of it alone."""
    case = platform.fit(Case(q_len=60, kv_len=70, scale=1.0, head_dim=8))
    arrays = make_inputs(case)
    sign = np.where(np.arange(60) % 2, -1.0, 1.0)[None, :, None, None]
    arrays["query"] = (np.abs(arrays["query"]) * size * sign).astype(arrays["query"].dtype)
    arrays["key"] = np.abs(arrays["key"])
    dout, dlse = make_cotangents(case)
    _, lse = truth.attention(**arrays, **case.options())
    assert lse.max() > 88 and lse.min() < -88
    expected = truth.gradients(dout, dlse, **arrays, **case.options())
    ours = gradients(
        functools.partial(jax_flashattn.prefill, return_lse=True, **case.options()),
        arrays,
        dout,
        dlse,
    )
    measure = xla.gradients(dout, dlse, **arrays, **case.options())
    for name in ours:
        check_gradient(ours[name], expected[name], measure[name], name, case.dtype, lse)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic(platform, deterministic):
    """deterministic=True repeats bit for bit; the default is as accurate."""
    case = Case(q_len=200, q_heads=6, kv_heads=2)
    check_gradients(platform, case, deterministic=deterministic)
    if deterministic:
        case = platform.fit(case)
        arrays = make_inputs(case)
        prefill = functools.partial(jax_flashattn.prefill, return_lse=True, deterministic=True)
        first = gradients(prefill, arrays, *make_cotangents(case))
        for _ in range(3):
            again = gradients(prefill, arrays, *make_cotangents(case))
            for name in first:
                check_same(again[name], first[name], name)


def test_only_what_is_asked_for(platform):
    """Gradients of a subset of the operands are those of all of them."""
    case = platform.fit(Case(q_len=40, bias="_NTS", sinks=True))
    arrays = make_inputs(case)
    dout, dlse = make_cotangents(case)
    prefill = functools.partial(jax_flashattn.prefill, return_lse=True)
    everything = gradients(prefill, arrays, dout, dlse)
    for name in everything:
        rest = {n: x for n, x in arrays.items() if n != name}
        (one,) = jax.vjp(
            lambda x, name=name, rest=rest: prefill(**{name: x}, **rest), arrays[name]
        )[1]((jnp.asarray(dout), jnp.asarray(dlse)))
        np.testing.assert_allclose(one, everything[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_slopes_have_no_gradient(platform):
    """ALiBi slopes are constants: asking for their derivative is refused, not answered by zero."""
    case = platform.fit(Case(q_len=20, alibi=True))
    arrays = make_inputs(case)
    slopes = arrays.pop("alibi_slopes")
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        jax.grad(lambda s: jax_flashattn.prefill(**arrays, alibi_slopes=s).sum())(
            jnp.asarray(slopes)
        )


def test_value_and_grad_of_a_loss(platform):
    """grad through a projection, as a model uses it, in the dtype of the model."""
    case = platform.fit(Case(q_len=33))
    arrays = make_inputs(case)
    weights = jnp.asarray(np.random.default_rng(3).standard_normal((32, 32)), arrays["query"].dtype)

    def loss(weights, attention):
        q = arrays["query"] @ weights
        return (attention(q, arrays["key"], arrays["value"]).astype(jnp.float32) ** 2).mean()

    ours = jax.grad(loss)(weights, jax_flashattn.prefill)
    same = jax.grad(loss)(weights, lambda *x: _reference.attention(*x)[0])
    assert ours.dtype == weights.dtype
    scale = float(jnp.abs(same).max())
    np.testing.assert_allclose(ours, same, atol=scale * 40 * float(jnp.finfo(same.dtype).eps))


# --- forward mode and higher orders; float64 on the CPU so that agreement is to rounding

F64 = Case(batch=2, q_len=9, kv_len=12, q_heads=2, kv_heads=1, head_dim=4, dtype="float64")
VARIANTS = [
    F64,
    F64.replace(causal=False, layout="BNTH"),
    F64.replace(kv_lengths=(12, 5), q_lengths=(4, 9)),
    F64.replace(bias="_NTS", sinks=True, softcap=3.0),
    F64.replace(window=(3, 1), causal=False, mask="__TS", alibi=True),
    F64.replace(q_len=12, kv_len=9, window=(2**31 - 2, 2**31 - 2), causal=False),
]


def _functions(case, arrays):
    """prefill and the reference, as functions of the dict of differentiable operands."""
    fixed = {name: x for name, x in arrays.items() if name not in DIFFERENTIABLE}
    moving = {name: jnp.asarray(x) for name, x in arrays.items() if name in DIFFERENTIABLE}

    def ours(moving):
        out, lse = jax_flashattn.prefill(**moving, **fixed, return_lse=True, **case.options())
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    def reference(moving):
        out, lse = _reference.attention(**moving, **fixed, **case.options())
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    return ours, reference, moving


def _close(ours, expected, rtol=1e-8):
    ours, expected = (jax.tree.leaves(x) for x in (ours, expected))
    for a, b in zip(ours, expected, strict=True):
        rtol = rtol if b.dtype == jnp.float64 else 1e-4
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def _directions(moving, seed):
    keys = jax.random.split(jax.random.key(seed), len(moving))
    return {
        name: jax.random.normal(key, x.shape, x.dtype)
        for key, (name, x) in zip(keys, moving.items(), strict=True)
    }


@pytest.mark.parametrize("case", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", ["jvp", "linearize", "grad of grad", "jvp of grad", "vjp of jvp"])
def test_modes(platform, case, mode):
    case = platform.fit(case)
    # Derivatives of NaN that nobody reads are the business of the first-order tests.
    arrays = make_inputs(case, poison=False)
    with precision(case):
        ours, reference, at = _functions(case, arrays)
        direction = _directions(at, 5)

        def loss(f):
            return lambda x: sum((leaf**3).sum() for leaf in jax.tree.leaves(f(x)))

        def run(f):
            if mode == "jvp":
                return jax.jvp(f, (at,), (direction,))
            if mode == "linearize":
                out, linear = jax.linearize(f, at)
                return out, linear(direction)
            if mode == "grad of grad":
                return jax.grad(lambda x: _dot(jax.grad(loss(f))(x), direction))(at)
            if mode == "jvp of grad":
                return jax.jvp(jax.grad(loss(f)), (at,), (direction,))
            return jax.grad(lambda x: jax.jvp(loss(f), (x,), (direction,))[1])(at)

        results = (jax.jit(run, static_argnums=0)(f) for f in (ours, reference))
        _close(*results, rtol=1e-6 if case.sinks else 1e-8)  # sinks are float32


def _dot(a, b):
    return sum(
        (x * y).sum().astype(jnp.float64)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_jacobians(platform, transform):
    case = platform.fit(F64.replace(batch=1, q_len=3, kv_len=3, head_dim=2))
    arrays = make_inputs(case, poison=False)
    with precision(case):
        ours, reference, at = _functions(case, arrays)

        def flat(f):
            return lambda x: (
                sum((leaf**2).sum() for leaf in f(x)) if transform is jax.hessian else f(x)
            )

        _close(transform(flat(ours))(at), transform(flat(reference))(at))


def test_jvp_in_low_precision(platform):
    """The tangent of half-precision prefill is in half precision, and right."""
    case = platform.fit(Case(q_len=70, dtype="bfloat16"))
    arrays = make_inputs(case)
    direction = {n: x.astype(jnp.bfloat16) for n, x in make_inputs(case, seed=7).items()}

    def tangent(attention, dtype):
        at = {n: jnp.asarray(x, dtype) for n, x in arrays.items()}
        along = {n: jnp.asarray(x, dtype) for n, x in direction.items()}
        return jax.jvp(lambda x: attention(**x), (at,), (along,))[1]

    ours = tangent(functools.partial(jax_flashattn.prefill, return_lse=True), jnp.bfloat16)
    low = tangent(_reference.attention, jnp.bfloat16)
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        expected = tangent(_reference.attention, jnp.float64)
    for a, e, x in zip(ours, expected, low, strict=True):
        check(a, np.asarray(e), x)


def test_scan_of_grads(platform):
    """A training loop: grad inside lax.scan."""
    case = platform.fit(Case(batch=1, q_len=17))
    q, k, v = (jnp.asarray(x) for x in make_inputs(case).values())

    def step(attention, q, _):
        grad = jax.grad(lambda q: (attention(q, k, v) ** 2).astype(jnp.float32).sum())(q)
        return q - (0.01 * grad).astype(q.dtype), None

    def train(attention):
        return jax.lax.scan(functools.partial(step, attention), q, length=4)[0]

    ours = jax.jit(lambda: train(jax_flashattn.prefill))()
    same = jax.jit(lambda: train(lambda *x: _reference.attention(*x)[0]))()
    eps = float(jnp.finfo(q.dtype).eps)
    np.testing.assert_allclose(ours, same, atol=64 * eps, rtol=64 * eps)


# --- rematerialisation


def _calls(function, *args):
    """How often each of our primitives stands in the jaxpr of function, by name."""
    counts = {}

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name.startswith("flash_"):
                counts[name] = counts.get(name, 0) + 1
            for sub in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                if hasattr(sub, "jaxpr"):
                    visit(sub.jaxpr)
                elif hasattr(sub, "eqns"):
                    visit(sub)

    visit(jax.make_jaxpr(function)(*args).jaxpr)
    return counts


def test_lse_is_computed_only_where_it_is_needed(platform):
    q, k, v = (jnp.asarray(x) for x in make_inputs(platform.fit(Case(q_len=40))).values())

    def results(function, *args):
        (eqn,) = (
            e for e in jax.make_jaxpr(function)(*args).eqns if e.primitive.name == "flash_prefill"
        )
        return len(eqn.outvars)

    out = jax_flashattn.prefill
    assert results(out, q, k, v) == 1
    assert results(lambda q: out(q, k, v, return_lse=True), q) == 2
    assert results(lambda q: jax.vjp(lambda q: out(q, k, v), q)[0], q) == 2


@pytest.mark.parametrize(
    "policy,forwards",
    [
        (None, 1),
        (jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse"), 1),
        (jax.checkpoint_policies.save_only_these_names("flash_out"), 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["no remat", "names", "one name", "nothing"],
)
def test_checkpoint_policies(platform, policy, forwards):
    case = platform.fit(Case(q_len=40))
    q, k, v = (jnp.asarray(x) for x in make_inputs(case).values())

    def layer(q):
        return jnp.sin(jax_flashattn.prefill(jnp.sin(q), k, v)).astype(jnp.float32).sum()

    remat = layer if policy is None else jax.checkpoint(layer, policy=policy)
    counts = _calls(jax.grad(remat), q)
    assert counts["flash_prefill"] == forwards, counts
    assert counts["flash_backward"] == 1, counts
    if forwards == 1:
        compiled = jax.jit(jax.grad(remat)).lower(q).compile().as_text()
        assert compiled.count('custom_call_target="flashattn_prefill') == 1
    np.testing.assert_allclose(jax.grad(remat)(q), jax.grad(layer)(q), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_lse", [True, False])
def test_no_cotangent_of_lse_is_none(with_lse):
    """A loss of the output alone has no zeros to allocate for lse."""
    arrays = make_inputs(Case(q_len=16))

    def loss(arrays):
        out, lse = jax_flashattn.prefill(**arrays, return_lse=True)
        return out.sum(dtype=jnp.float32) + (lse.sum() if with_lse else 0)

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    assert "lse,dout" in text
    assert ("dout,dlse" in text) == with_lse
