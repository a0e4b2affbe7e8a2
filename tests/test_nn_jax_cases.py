"""What jax's own tests ask of jax.nn.dot_product_attention (jax-ml/jax, tests/nn_test.py), asked of ours.

Same shapes, dtypes, masks and tolerances; the reference is jax.nn in XLA. Where those tests compare cuDNN
with XLA, these compare the kernels of this package with XLA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flashattn

B, T, S, N, H = 2, 128, 128, 4, 32

implementations = pytest.mark.parametrize("implementation", [None, "flash"])


def normal(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.fixture(autouse=True)
def promotion():
    """jax.nn promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def close(ours, theirs, tolerance=0.01):
    assert ours.dtype == theirs.dtype
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def pull(attention, cotangent, *operands):
    """(what attention returns, the cotangents of the operands)."""
    out, vjp = jax.vjp(attention, *operands)
    return out, vjp(cotangent)


@implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_forward_and_backward(platform, implementation, dtype, group, vmap, residual):
    """Against jax.nn on repeated heads, whose gradients are then summed; the residual's cotangent adds
    nothing."""
    q = normal((B, T, N, H), dtype, 0)
    k, v = (normal((B, S, N // group, H), dtype, seed) for seed in (1, 2))
    cotangent, lse_cotangent = normal(q.shape, dtype, 3), normal(q.shape[:3], dtype, 4)

    ours = functools.partial(
        jax_flashattn.dot_product_attention, implementation=implementation, return_residual=residual
    )
    if vmap:
        ours = jax.vmap(ours, in_axes=(0, 0, 0))
    out, grads = pull(ours, (cotangent, lse_cotangent) if residual else cotangent, q, k, v)

    repeated = [jnp.repeat(x, group, axis=2) for x in (k, v)]
    expected, (dq, *of_heads) = pull(jax.nn.dot_product_attention, cotangent, q, *repeated)
    dk, dv = (x.reshape(B, S, N // group, group, H).sum(3) for x in of_heads)
    if residual:
        out, lse = out
        logits = jnp.einsum("btnh,bsnh->btns", q, repeated[0], preferred_element_type=jnp.float32)
        close(lse, jax.nn.logsumexp(logits / H**0.5, axis=-1).astype(dtype))
    close(out, expected)
    for ours, theirs in zip(grads, (dq, dk, dv), strict=True):
        close(ours, theirs)


MODES = [
    "bias", "causal", "padding", "custom", "causal padding", "custom padding", "bias causal",
    "causal window",
]  # fmt: skip


@implementations
@pytest.mark.parametrize("mode", MODES)
def test_masks(platform, mode, implementation):
    """Gradients to the bias too; mask and lengths are arguments of the differentiated function."""
    dtype = jnp.bfloat16
    q, k, v, cotangent = (normal((B, T, N, H), dtype, seed) for seed in range(4))
    bias = mask = q_lengths = kv_lengths = window = None
    if "padding" in mode:
        q_lengths = jnp.array([T // 2, T // 4], jnp.int32)
        kv_lengths = jnp.array([S // 4, S // 2], jnp.int32)
    if "custom" in mode:
        mask = jnp.tril(jnp.ones((T, S), bool))[None, None]
    if "bias" in mode:
        bias = normal((1, N, T, S), dtype, 4)
    if "window" in mode:
        window = (3, 2)

    def run(attention, q, k, v, bias, mask, q_lengths, kv_lengths):
        return attention(
            q, k, v, bias, mask, is_causal="causal" in mode, local_window_size=window,
            query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths,
        )  # fmt: skip

    flash = functools.partial(jax_flashattn.dot_product_attention, implementation=implementation)
    (out, grads), (expected, expected_grads) = (
        pull(
            functools.partial(run, attention), cotangent, q, k, v, bias, mask, q_lengths, kv_lengths
        )
        for attention in (flash, jax.nn.dot_product_attention)
    )
    close(out, expected)
    dq, dk, dv, dbias = zip(grads[:4], expected_grads[:4], strict=True)
    close(*dq, tolerance=0.02)
    close(*dk, tolerance=0.02)
    close(*dv, tolerance=0.01)
    if bias is not None:
        close(*dbias, tolerance=0.02)


@implementations
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("vmap", [False, True])
def test_bias_gradient(platform, batch, vmap, implementation):
    """One array as query, key and value; a bias and a mask of rank 3. The gradient is compared with that
    in float32. Rows of one large probability subtract two numbers near 60, of which one has the rounding
    of the output in it: jax.nn's own error in the same dtype is the measure."""
    dtype = jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (batch, S, N, H), dtype)
    bias = jax.random.normal(keys[1], (batch, N, S, S), dtype)
    mask = jnp.ones((1, 1, S), bool)

    def run(attention, x, bias, mask):
        return attention(query=x, key=x, value=x, bias=bias, mask=mask, is_causal=False)

    flash = functools.partial(jax_flashattn.dot_product_attention, implementation=implementation)
    ours, theirs = (
        functools.partial(run, attention) for attention in (flash, jax.nn.dot_product_attention)
    )
    forward = [jax.vmap(f, in_axes=(0, 0, None)) if vmap else f for f in (ours, theirs)]
    close(*(jax.jit(f)(x, bias, mask) for f in forward))
    dbias = jax.jit(functools.partial(pull, ours))(x, x, bias, mask)[1][1]
    with jax.default_matmul_precision("highest"):
        exact = [y.astype(jnp.float32) for y in (x, x, bias)]
        expected = jax.jit(functools.partial(pull, theirs))(*exact, mask)[1][1]
    reference = jax.jit(functools.partial(pull, theirs))(x, x, bias, mask)[1][1]
    error, allowed = (np.abs(np.float32(y) - expected).max() for y in (dbias, reference))
    assert error <= 2 * allowed + 0.1


def test_float64_mask_under_debug_infs(platform):
    """A mask of rank 1, N a multiple of K, and no infinity anywhere (jax issue 37422)."""
    t, s, k, n, h = 5, 7, 3, 6, 11
    mask = jnp.arange(s) <= s // 2
    with jax.enable_x64(True), jax.debug_infs(True):
        q, k = jnp.zeros((t, n, h), jnp.float64), jnp.zeros((s, k, h), jnp.float64)
        out = jax_flashattn.dot_product_attention(q, k, k, mask=mask)
        assert out.dtype == jnp.float64
        np.testing.assert_array_equal(out, np.zeros((t, n, h)))


def test_window_without_other_masks(platform):
    """The window alone is a mask; float32 on every platform."""
    q, k, v = (normal((B, T, N, H), jnp.float32, seed) for seed in range(3))
    wide, narrow = (
        jax_flashattn.dot_product_attention(q, k, v, mask=None, local_window_size=(w, w))
        for w in (32, 1)
    )
    assert not np.allclose(wide, narrow)
    near = np.abs(np.arange(T)[:, None] - np.arange(S)) <= 1
    expected = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(near)[None, None])
    np.testing.assert_allclose(narrow, expected, atol=1e-5 if platform.name == "cpu" else 1e-2)
