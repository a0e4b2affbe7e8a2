"""The drop-in: jax_flashattn.dot_product_attention answers as jax.nn.dot_product_attention does."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def exact(*args, **options):
    """The same in float64 on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [None if x is None else np.asarray(x, np.float64) for x in args[:4]]
        mask = [np.asarray(x) for x in args[4:] if x is not None]
        return jax.tree.map(np.asarray, theirs(*wide, *mask, **options))


def agree(args, options, **extra):
    """Ours is as near to jax.nn in float64 as jax.nn is in the dtype: at most twice as far."""
    ours = jax_flashattn.dot_product_attention(*args, **options, **extra)
    reference, truth = theirs(*args, **options), exact(*args, **options)
    for a, x, e in zip(*map(jax.tree.leaves, (ours, reference, truth)), strict=True):
        assert a.shape == x.shape and a.dtype == x.dtype
        a, x = (np.asarray(y, np.float64) for y in (a, x))
        eps = float(jnp.finfo(args[0].dtype).eps)
        assert np.abs(a - e).max() <= 2 * np.abs(x - e).max() + 4 * eps * np.abs(e).max()


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
    agree(args, dict(return_residual=True))


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
