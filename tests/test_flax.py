"""The adapter for flax, with the real flax."""

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
