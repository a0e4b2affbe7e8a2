"""The adapter for flax, with the real flax."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax", reason="flax is not installed")

from flax import linen, nnx  # noqa: E402

from jax_flashattn.flax import attention_fn  # noqa: E402

SIZES = dict(num_heads=4, qkv_features=32)


@pytest.fixture
def relaxed():
    """flax promotes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def inputs(platform, length=9):
    x = np.random.default_rng(0).standard_normal((2, length, 32))
    return jnp.asarray(x, platform.dtype)


@pytest.mark.parametrize("masked", [False, True])
def test_nnx(platform, relaxed, masked):
    x = inputs(platform)
    mask = nnx.make_causal_mask(jnp.ones(x.shape[:2])) if masked else None

    def run(**options):
        layer = nnx.MultiHeadAttention(
            in_features=32, decode=False, rngs=nnx.Rngs(0), dtype=x.dtype, **SIZES, **options
        )
        return layer(x, mask=mask)

    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(run(attention_fn=attention_fn), run(), atol=tolerance)


def test_nnx_decode(platform, relaxed):
    """One token at a time over flax's own cache."""
    x = inputs(platform)

    def run(**options):
        layer = nnx.MultiHeadAttention(
            in_features=32, decode=True, rngs=nnx.Rngs(0), dtype=x.dtype, **SIZES, **options
        )
        layer.init_cache(x.shape, dtype=x.dtype)
        return jnp.concatenate([layer(x[:, t : t + 1]) for t in range(x.shape[1])], axis=1)

    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(run(attention_fn=attention_fn), run(), atol=tolerance)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "padding", "per head"])
def test_nnx_is_causal(platform, relaxed, kv_heads, mask):
    """The keyword of the call, grouped heads, and masks as flax makes them."""
    x = inputs(platform)
    masks = {
        "none": None,
        "padding": nnx.make_attention_mask(
            jnp.ones((2, 9)), jnp.arange(9)[None] < jnp.array([[9], [4]])
        ),
        "per head": jnp.arange(4 * 9 * 9).reshape(1, 4, 9, 9) % 7 != 3,
    }

    def run(**options):
        layer = nnx.MultiHeadAttention(
            in_features=32, decode=False, rngs=nnx.Rngs(0), dtype=x.dtype, num_kv_heads=kv_heads,
            **SIZES, **options,
        )  # fmt: skip
        return layer(x, mask=masks[mask], is_causal=True)

    if "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters:
        pytest.skip("this flax has no grouped heads")
    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(run(attention_fn=attention_fn), run(), atol=tolerance)


def test_nnx_options(platform, relaxed):
    """functools.partial sets what flax does not know."""
    x = inputs(platform)
    near = jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)) <= 2

    def run(fn, mask=None):
        layer = nnx.MultiHeadAttention(
            in_features=32, decode=False, rngs=nnx.Rngs(0), dtype=x.dtype, attention_fn=fn, **SIZES
        )
        return layer(x, mask=mask)

    window = functools.partial(attention_fn, local_window_size=2, implementation="flash")
    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(run(window), run(attention_fn, near[None, None]), atol=tolerance)


@pytest.mark.parametrize("mask_rank", [2, 3, 4, 5])
def test_batch_axes(platform, relaxed, mask_rank):
    """Two batch axes and none; masks and biases that broadcast over them, of any rank."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 9, 4, 8)), platform.dtype) for _ in range(3))
    full = (2, 1, 4, 9, 9)[-mask_rank:]
    mask, bias = (
        jnp.asarray(rng.random(full) < 0.7),
        jnp.asarray(rng.standard_normal(full), q.dtype),
    )
    out = attention_fn(q, k, v, bias, mask)
    whole = (2, 3, 4, 9, 9)
    for i, j in np.ndindex(2, 3):
        alone = attention_fn(
            q[i, j], k[i, j], v[i, j],
            jnp.broadcast_to(bias, whole)[i, j], jnp.broadcast_to(mask, whole)[i, j],
        )  # fmt: skip
        np.testing.assert_array_equal(out[i, j], alone)
    expected = nnx.dot_product_attention(
        q, k, v, jnp.broadcast_to(bias, whole), jnp.broadcast_to(mask, whole)
    )
    tolerance = 20 * float(jnp.finfo(q.dtype).eps)
    np.testing.assert_allclose(out, expected, atol=tolerance)


def test_dtypes(platform, relaxed):
    """Without dtype the inputs are promoted to one, as flax does; with it they are cast."""
    q = jnp.ones((1, 5, 2, 8), jnp.bfloat16)
    k = jnp.ones((1, 5, 2, 8), jnp.float32)
    assert attention_fn(q, k, k).dtype == nnx.dot_product_attention(q, k, k).dtype == jnp.float32
    assert attention_fn(q, k, k, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("masked", [False, True])
def test_linen(platform, relaxed, masked):
    x = inputs(platform)
    mask = linen.make_causal_mask(jnp.ones(x.shape[:2])) if masked else None
    layers = [
        linen.MultiHeadDotProductAttention(dtype=x.dtype, **SIZES, **options)
        for options in ({}, dict(attention_fn=attention_fn))
    ]
    variables = layers[0].init(jax.random.key(0), x)
    theirs, ours = (layer.apply(variables, x, mask=mask) for layer in layers)
    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(ours, theirs, atol=tolerance)


def test_linen_decode(platform, relaxed):
    """One token at a time over flax's own cache."""
    x = inputs(platform)

    def run(**options):
        layer = linen.MultiHeadDotProductAttention(decode=True, dtype=x.dtype, **SIZES, **options)
        variables = layer.init(jax.random.key(0), x)
        params, cache = variables["params"], variables["cache"]
        outs = []
        for t in range(x.shape[1]):
            out, changed = layer.apply(
                {"params": params, "cache": cache}, x[:, t : t + 1], mutable=["cache"]
            )
            cache = changed["cache"]
            outs.append(out)
        return jnp.concatenate(outs, axis=1)

    tolerance = 100 * float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(run(attention_fn=attention_fn), run(), atol=tolerance)


def test_every_keyword_of_flax_is_known():
    """linen drops in silence what attention_fn does not name; nnx passes all that it has."""
    ours = inspect.signature(attention_fn).parameters
    for function in (nnx.dot_product_attention, linen.dot_product_attention):
        assert set(inspect.signature(function).parameters) - set(ours) <= {"promote_dtype"}


def test_linen_extra_keywords(platform, relaxed):
    """A float32 softmax is what the kernels have; einsums of one's own are refused."""
    x = inputs(platform)

    def run(**options):
        layer = linen.MultiHeadDotProductAttention(
            dtype=x.dtype, attention_fn=attention_fn, **SIZES, **options
        )
        return layer.init_with_output(jax.random.key(0), x)[0]

    np.testing.assert_array_equal(run(force_fp32_for_softmax=True), run())
    with pytest.raises(NotImplementedError, match="attention_fn: the products are the kernel's"):
        run(
            qk_attn_weights_einsum_cls=lambda: jnp.einsum,
            attn_weights_value_einsum_cls=lambda: jnp.einsum,
        )


def test_gradients(platform, relaxed):
    x = inputs(platform)
    layers = [
        linen.MultiHeadDotProductAttention(dtype=x.dtype, **SIZES, **options)
        for options in ({}, dict(attention_fn=attention_fn))
    ]
    variables = layers[0].init(jax.random.key(0), x)

    def gradient(layer):
        return jax.grad(lambda v: (layer.apply(v, x).astype(jnp.float32) ** 2).sum())(variables)

    theirs, ours = map(gradient, layers)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(theirs))
    tolerance = 200 * float(jnp.finfo(x.dtype).eps) * largest
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_dropout_is_refused(platform, relaxed):
    q = jnp.zeros((2, 9, 4, 8), platform.dtype)
    with pytest.raises(NotImplementedError, match="attention_fn: dropout .*, got .*; "):
        attention_fn(q, q, q, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    attention_fn(q, q, q, dropout_rate=0.1, deterministic=True)


def test_sowing_is_refused(platform, relaxed):
    x = inputs(platform)
    layer = nnx.MultiHeadAttention(
        in_features=32, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn, **SIZES
    )
    with pytest.raises(NotImplementedError, match="attention_fn: the attention weights"):
        layer(x, sow_weights=True)
