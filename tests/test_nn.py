"""The drop-in: jax_flashattn.dot_product_attention answers as jax.nn.dot_product_attention does."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import check

import jax_flashattn

B, T, S, N, K, H = 2, 21, 21, 4, 2, 16


def inputs(dtype, t=T, s=S, n=N, k=K, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, t, n, H), (B, s, k, H), (B, s, k, H))
    return tuple(jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)


def theirs(*args, **options):
    """jax.nn's answer; its code promotes dtypes, which this test suite forbids ours to do."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(*args, **options, implementation="xla")


def exact(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    return_residual=False,
):
    """What the newest jax.nn computes, in float64 numpy (older ones have bugs): masked scores are a
    large negative number, so that a row which sees nothing gets the mean of the values."""
    has_batch = query.ndim == 4
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    q, k, v = (x if has_batch else x[None] for x in (q, k, v))
    (t, n), (s, heads) = q.shape[1:3], k.shape[1:3]
    k, v = (x.repeat(n // heads, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    visible = np.ones(scores.shape, bool) if mask is None else np.asarray(mask)
    i, j = np.arange(t)[:, None], np.arange(s)[None, :]
    if is_causal:
        visible = visible & (j <= i)
    if local_window_size is not None:
        left, right = local_window_size if np.ndim(local_window_size) else [local_window_size] * 2
        visible = visible & (i - left <= j) & (j <= i + right)
    if query_seq_lengths is not None:
        real = np.arange(t) < query_seq_lengths[:, None]
        visible = visible & real[:, None, :, None]
    if key_value_seq_lengths is not None:
        visible = visible & (j < key_value_seq_lengths[:, None, None])[:, None]
    scores = np.where(visible, scores, -0.7 * float(np.finfo(np.float32).max))
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", weights / total, v)
    if query_seq_lengths is not None:
        out = out * real[:, :, None, None]
    lse = (top + np.log(total))[..., 0].swapaxes(1, 2)
    results = (out, lse) if has_batch else (out[0], lse[0])
    return results if return_residual else results[0]


def agree(args, options, **extra):
    """Ours is at most twice as far from the exact answer as jax.nn is in the same dtype."""
    ours = jax_flashattn.dot_product_attention(*args, **options, **extra)
    reference, truth = theirs(*args, **options), exact(*args, **options)
    for a, x, e in zip(*map(jax.tree.leaves, (ours, reference, truth)), strict=True):
        assert a.shape == x.shape and a.dtype == x.dtype
        check(a, e.astype(a.dtype).astype(np.float64), x)


@pytest.fixture
def dtype(platform):
    return platform.dtype


def test_signature():
    """Every parameter of jax.nn's function, in its order, with its default."""
    ours = inspect.signature(jax_flashattn.dot_product_attention).parameters
    for name, parameter in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert name in ours, name
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


LENGTHS = np.int32([13, 21])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, (4, 0), (0, 5), (2, 3), (-1, -1)], ids=str)
@pytest.mark.parametrize("lengths", ["none", "query", "key", "both"])
def test_masks(dtype, causal, window, lengths):
    options = dict(is_causal=causal, local_window_size=window)
    if lengths in ("query", "both"):
        options["query_seq_lengths"] = LENGTHS
    if lengths in ("key", "both"):
        options["key_value_seq_lengths"] = LENGTHS[::-1].copy()
    agree(inputs(dtype), options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(21, 33), (33, 21), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("window", [None, (5, 2)], ids=str)
def test_cross_lengths(dtype, causal, sizes, window):
    """Causal masks and windows are top-left there."""
    args = inputs(dtype, *sizes)
    agree(args, dict(is_causal=causal, local_window_size=window))
    agree(args, dict(is_causal=causal, key_value_seq_lengths=np.int32([sizes[1], 1])))


BIASES = [(B, N, T, S), (1, N, T, S), (B, 1, 1, S), (1, 1, T, S), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("kind", ["bias", "mask", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_bias_and_mask(dtype, shape, kind, causal):
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.standard_normal(shape), dtype) if kind != "mask" else None
    mask = jnp.asarray(rng.random(shape) < 0.7) if kind != "bias" else None
    args = inputs(dtype)
    options = dict(is_causal=causal, key_value_seq_lengths=LENGTHS)
    if mask is None:
        agree((*args, bias), options)
    else:
        agree((*args, bias, mask), options)


def test_rows_that_see_nothing(dtype):
    """jax.nn answers with the mean of V there, not with zero."""
    args = inputs(dtype)
    mask = jnp.ones((1, 1, T, S), bool).at[:, :, 4].set(False)
    agree((*args, None, mask), {})
    agree((*args, None, jnp.zeros((1, 1, T, S), bool)), {})
    agree(args, dict(key_value_seq_lengths=np.int32([0, 5])))
    agree(args, dict(local_window_size=(-1, -1)))


needs_residual = pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters,
    reason="this jax.nn returns no residual",
)


@needs_residual
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["all", "ragged"])
def test_residual(dtype, causal, lengths):
    agree(
        inputs(dtype), dict(is_causal=causal, key_value_seq_lengths=lengths, return_residual=True)
    )


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0])
def test_scale(dtype, scale):
    agree(inputs(dtype), dict(scale=scale))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)], ids=str)
def test_heads(dtype, heads):
    agree(inputs(dtype, n=heads[0], k=heads[1]), dict(is_causal=True))


def test_without_batch(dtype):
    args = tuple(x[0] for x in inputs(dtype))
    agree(args, dict(is_causal=True))


@needs_residual
def test_residual_without_batch(dtype):
    agree(tuple(x[0] for x in inputs(dtype)), dict(return_residual=True))


@pytest.mark.parametrize("causal,ragged", list(itertools.product([False, True], repeat=2)))
def test_gradients(dtype, causal, ragged):
    args = inputs(dtype)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((1, N, T, S)), dtype)
    cotangent = inputs(dtype, seed=5)[0]
    options = dict(is_causal=causal, key_value_seq_lengths=LENGTHS if ragged else None)

    def pull(attention, args, cotangent):
        return jax.vjp(lambda *x: attention(*x, **options), *args)[1](cotangent)

    ours = pull(jax_flashattn.dot_product_attention, (*args, bias), cotangent)
    with jax.numpy_dtype_promotion("standard"):
        xla = pull(theirs, (*args, bias), cotangent)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(x, np.float64) for x in (*args, bias, cotangent)]
        with jax.numpy_dtype_promotion("standard"):
            truth = pull(theirs, wide[:4], wide[4])
    for a, x, e in zip(ours, xla, truth, strict=True):
        assert a.dtype == x.dtype
        a, x, e = (np.asarray(y, np.float64) for y in (a, x, e))
        eps = float(jnp.finfo(args[0].dtype).eps)
        assert np.abs(a - e).max() <= 2 * np.abs(x - e).max() + 4 * eps * np.abs(e).max()


def test_jit_and_vmap(dtype):
    args = inputs(dtype)
    out = jax_flashattn.dot_product_attention(*args, is_causal=True)
    jitted = jax.jit(jax_flashattn.dot_product_attention, static_argnames="is_causal")
    np.testing.assert_array_equal(jitted(*args, is_causal=True), out)
    many = [jnp.stack([x, x]) for x in args]
    mapped = jax.vmap(lambda *x: jax_flashattn.dot_product_attention(*x, is_causal=True))(*many)
    np.testing.assert_array_equal(mapped[1], out)


@pytest.mark.parametrize("implementation", [None, "flash", "xla"])
def test_implementations(dtype, implementation):
    agree(inputs(dtype), dict(is_causal=True), implementation=implementation)


def test_unknown_implementation(dtype):
    with pytest.raises(ValueError, match="implementation.*fastest"):
        jax_flashattn.dot_product_attention(*inputs(dtype), implementation="fastest")


@pytest.mark.parametrize(
    "change",
    [
        dict(key=jnp.zeros((B, S, K, 8))),
        dict(value=jnp.zeros((B, S + 1, K, H))),
        dict(key=jnp.zeros((B, S, 3, H)), value=jnp.zeros((B, S, 3, H))),
        dict(mask=jnp.zeros((1, 1, T, S))),
        dict(query_seq_lengths=np.float32([3, 4])),
        dict(key_value_seq_lengths=np.int32([3])),
        dict(value=jnp.zeros((B, S, K, H), jnp.bfloat16)),
    ],
    ids=str,
)
def test_errors_where_jax_nn_has_them(dtype, change):
    """What jax.nn refuses, with a ValueError, so does ours."""
    q, k, v = inputs("float32")
    call = {**dict(query=q, key=k, value=v), **change}
    with pytest.raises(ValueError), jax.numpy_dtype_promotion("standard"):
        jax.nn.dot_product_attention(**call)
    with pytest.raises((ValueError, TypeError)):
        jax_flashattn.dot_product_attention(**call)


def test_integer_like_inputs(dtype):
    """numpy arrays and lists of lengths, as jax.nn takes them."""
    args = tuple(np.asarray(x) for x in inputs(dtype))
    agree(args, dict(key_value_seq_lengths=LENGTHS))
