"""The drop-in: jax_flashattn.dot_product_attention answers as jax.nn.dot_product_attention does."""

import contextlib
import functools
import inspect

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_flashattn

B, T, S, N, K, H = 2, 21, 21, 4, 2, 16
MASKED = -0.7 * float(np.finfo(np.float32).max)


def inputs(dtype, t=T, s=S, n=N, k=K, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, t, n, H), (B, s, k, H), (B, s, k, H))
    return tuple(jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)


def theirs(*args, **options):
    """jax.nn's answer; its code promotes dtypes, which this test suite forbids ours to do."""
    call = functools.partial(jax.nn.dot_product_attention, **options, implementation="xla")
    with jax.numpy_dtype_promotion("standard"):
        return widened(lambda *args: jax.jit(call)(*args), *args)


def lacks_product(error):
    """XLA for GPUs has no float16 product over a single key or dimension, which jax.nn asks for."""
    return "Unsupported dot precision algorithm" in str(error)


def widened(call, *args):
    """call(*args), in float32 where XLA cannot do it in the arguments' dtype."""
    try:
        return call(*args)
    except jax.errors.JaxRuntimeError as e:
        if not lacks_product(e):
            raise
    dtype = args[0].dtype
    floats = [x is not None and jnp.issubdtype(x.dtype, jnp.floating) for x in args]
    args = [
        x.astype(jnp.float32) if is_float else x for x, is_float in zip(args, floats, strict=True)
    ]
    return jax.tree.map(lambda x: x.astype(dtype), call(*args))


@contextlib.contextmanager
def float64():
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


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
    """What the newest jax.nn computes, on float64 arrays (older ones have bugs): masked scores are a
    large negative number, so that a row which sees nothing gets the mean of the values."""
    shape = query.shape
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    (t, n), (s, heads) = q.shape[1:3], k.shape[1:3]
    k, v = (jnp.repeat(x, n // heads, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)

    def rank4(x):
        return x.reshape((1,) * (4 - x.ndim) + x.shape)

    if bias is not None:
        scores = scores + rank4(bias)
    visible = np.ones(scores.shape, bool) if mask is None else rank4(mask)
    i, j = np.arange(t)[None, None, :, None], np.arange(s)[None, None, None, :]
    if is_causal:
        visible = visible & (j <= i)
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2)
        visible = visible & (i - left <= j) & (j <= i + right)
    real = np.ones((1, t, 1, 1), bool)
    if query_seq_lengths is not None:
        real = np.arange(t)[None, :, None, None] < query_seq_lengths[:, None, None, None]
        visible = visible & real.swapaxes(1, 2)
    if key_value_seq_lengths is not None:
        visible = visible & (j < key_value_seq_lengths[:, None, None, None])
    scores = jnp.where(visible, scores, MASKED)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.where(real, jnp.einsum("bnts,bsnh->btnh", weights / total, v), 0).reshape(shape)
    if not return_residual:
        return out
    lse = (top + jnp.log(total))[..., 0].swapaxes(1, 2).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(lse)


def wide(x):
    return jnp.asarray(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def agree(args, options, attention=jax_flashattn.dot_product_attention):
    """Ours is at most twice as far from the exact answer as jax.nn is in the same dtype."""
    with float64():
        call = jax.jit(functools.partial(exact, **options))
        truth = call(*(x if x is None else wide(x) for x in args))
    residual = options.get("return_residual", False)
    measure = {n: x for n, x in options.items() if n != "return_residual"}
    ours, reference = attention(*args, **options), theirs(*args, **measure)
    if residual:
        (ours, lse), (truth, true_lse) = ours, truth
        check_residual(lse, true_lse, args[1].dtype)
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    near(ours, reference, truth, scale=np.nanmax(np.abs(wide(args[2]))))


def near(ours, reference, truth, scale):
    """At most twice as far from the truth as jax.nn is, and four roundings of numbers of this scale:
    of the terms, not of a sum in which they may cancel."""
    eps = float(jnp.finfo(ours.dtype).eps)
    ours, reference, truth = (np.asarray(x, np.float64) for x in (ours, reference, truth))
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(ours[~finite], truth[~finite])
    error, allowed = (np.abs(x - truth)[finite].max(initial=0.0) for x in (ours, reference))
    assert error <= 2 * allowed + 4 * eps * float(scale)


def check_residual(lse, truth, dtype, atol=1e-5):
    """The logarithm in float32, rounded to the inputs' dtype."""
    assert lse.shape == truth.shape and lse.dtype == dtype
    lse, truth = np.asarray(lse, np.float64), np.asarray(truth)
    with np.errstate(over="ignore"):
        nothing = float(np.asarray(MASKED).astype(dtype))
    empty = truth < MASKED / 2
    np.testing.assert_allclose(lse[empty], nothing, rtol=float(jnp.finfo(dtype).eps))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(lse[~empty], truth[~empty], rtol=eps, atol=eps + atol)


def agree_gradients(args, options, attention=jax_flashattn.dot_product_attention):
    """The gradients to every float argument, by the same rule."""
    moving = [
        i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    cotangent = np.random.default_rng(5).standard_normal(args[0].shape)

    def pull(attention, args, dtype):
        def run(*chosen):
            full = list(args)
            for i, x in zip(moving, chosen, strict=True):
                full[i] = x
            return attention(*full, **options)

        @jax.jit
        def vjp(cotangent, *chosen):
            return jax.vjp(run, *chosen)[1](cotangent)

        return vjp(jnp.asarray(cotangent, dtype), *(args[i] for i in moving))

    dtype = args[0].dtype
    cotangent = np.asarray(jnp.asarray(cotangent, dtype), np.float64)
    ours = pull(attention, args, dtype)
    with jax.numpy_dtype_promotion("standard"):
        reference = widened(lambda *args: pull(theirs, args, args[0].dtype), *args)
    with float64():
        truth = pull(exact, [x if x is None else wide(x) for x in args], jnp.float64)
    scale = max(np.abs(x).max() for x in truth)
    scores = args[0].size // args[0].shape[-1] * args[1].shape[-3]
    for i, a, x, e in zip(moving, ours, reference, truth, strict=True):
        assert a.dtype == x.dtype == args[i].dtype and a.shape == x.shape
        terms = scores // a.size if i == 3 else 1  # the roundings of so many add up
        near(a, x, e, scale * terms**0.5)


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


@pytest.mark.parametrize("window", [(3, 1), (-1, 3)], ids=str)
def test_window_alone_in_xla(dtype, window, monkeypatch):
    """Where XLA does the call it applies a window that is the only mask, which jax 0.8.0 forgets."""
    monkeypatch.setattr(jax_flashattn._nn, "reasons_against", lambda *_, **__: ("a test", None))
    agree(inputs(dtype), dict(local_window_size=window))


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0])
def test_scale(dtype, scale):
    agree(inputs(dtype), dict(scale=scale))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)], ids=str)
def test_heads(dtype, heads):
    agree(inputs(dtype, n=heads[0], k=heads[1]), dict(is_causal=True))


def test_without_batch(dtype):
    args = tuple(x[0] for x in inputs(dtype))
    agree(args, dict(is_causal=True))


def test_residual_without_batch(dtype):
    agree(tuple(x[0] for x in inputs(dtype)), dict(return_residual=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", ["none", "query", "key"])
@pytest.mark.parametrize("extra", ["bias", "mask", "window"])
def test_gradients(dtype, causal, lengths, extra):
    """Also through rows that see nothing, which pass the gradient of the mean to the values."""
    rng = np.random.default_rng(1)
    bias = mask = window = None
    if extra == "bias":
        bias = jnp.asarray(rng.standard_normal((1, N, T, S)), dtype)
    if extra == "mask":
        mask = jnp.asarray(rng.random((B, 1, T, S)) < 0.2)
    if extra == "window":
        window = (2, 1)
    options = dict(is_causal=causal, local_window_size=window)
    if lengths != "none":
        options |= {f"{lengths}_seq_lengths".replace("key", "key_value"): np.int32([13, 0])}
    agree_gradients((*inputs(dtype), bias, mask), options)


def test_residual_has_no_gradient(dtype):
    args = inputs(dtype)

    def of_lse(*args):
        return jax_flashattn.dot_product_attention(*args, return_residual=True)[1].sum()

    for gradient in jax.grad(of_lse, argnums=(0, 1, 2))(*args):
        assert not gradient.any()


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
    attention = functools.partial(
        jax_flashattn.dot_product_attention, implementation=implementation
    )
    agree(inputs(dtype), dict(is_causal=True), attention)


def both(call, **extra):
    """(ours, jax.nn's): what each returns or raises."""
    results = []
    for function in (jax_flashattn.dot_product_attention, jax.nn.dot_product_attention):
        with jax.numpy_dtype_promotion("standard"):
            try:
                results.append(function(**call, **extra))
            except Exception as e:
                results.append(e)
        extra = {}
    return results


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


REFUSED = {
    "head dims": dict(key=zeros(B, S, K, 8)),
    "key and value": dict(value=zeros(B, S + 1, K, H)),
    "heads": dict(key=zeros(B, S, 3, H), value=zeros(B, S, 3, H)),
    "batches": dict(query=zeros(3, T, N, H)),
    "rank": dict(query=zeros(1, B, T, N, H)),
    "dtypes": dict(value=zeros(B, S, K, H, dtype=jnp.bfloat16)),
    "float8": dict.fromkeys(("query", "key", "value"), zeros(B, S, N, H, dtype=jnp.float8_e4m3fn)),
    "query None": dict(query=None),
    "query text": dict(query="q"),
    "float mask": dict(mask=zeros(1, 1, T, S)),
    "integer mask": dict(mask=zeros(1, 1, T, S, dtype=jnp.int32)),
    "mask heads": dict(mask=zeros(1, K, T, S, dtype=bool)),
    "mask batch": dict(mask=zeros(3, 1, T, S, dtype=bool)),
    "mask rank": dict(mask=zeros(1, 1, 1, T, S, dtype=bool)),
    "bias rows": dict(bias=zeros(1, 1, T + 1, S)),
    "bias rank": dict(bias=zeros(1, 1, 1, T, S)),
    "float lengths": dict(query_seq_lengths=np.float32([3, 4])),
    "short lengths": dict(key_value_seq_lengths=np.int32([3])),
    "scalar lengths": dict(key_value_seq_lengths=3),
    "narrow lengths": dict(query_seq_lengths=np.int8([3, 4])),
    "window None": dict(is_causal=True, local_window_size=(3, None)),
    "window of three": dict(is_causal=True, local_window_size=(1, 2, 3)),
    "window numpy": dict(is_causal=True, local_window_size=np.int32(3)),
    "window text": dict(is_causal=True, local_window_size="wide"),
    "scale text": dict(scale="large"),
    "implementation": dict(implementation="fastest"),
    "cudnn window": dict(implementation="cudnn", local_window_size=(2, 2)),
}


@pytest.mark.parametrize("implementation", [None, "flash"])
@pytest.mark.parametrize("change", REFUSED)
def test_errors(platform, change, implementation):
    """What jax.nn refuses, so does ours, with the same error."""
    q, k, v = inputs("float32")
    call = dict(query=q, key=k, value=v) | REFUSED[change]
    extra = {} if "implementation" in call else dict(implementation=implementation)
    ours, jax_nn = both(call, **extra)
    assert isinstance(jax_nn, Exception), jax_nn
    assert type(ours) is type(jax_nn)
    if implementation is None:  # else it is found while tracing, and messages may name a tracer
        assert str(ours) == str(jax_nn)


# With is_causal wherever there is a window: jax 0.8.0 forgets one that is the only mask.
UNUSUAL = {
    "one query row": dict(query=zeros(N, H), key=zeros(S, K, H), value=zeros(S, K, H)),
    "mixed ranks": dict(key=zeros(S, K, H), value=zeros(S, K, H), query=zeros(1, T, N, H)),
    "no queries": dict(query=zeros(B, 0, N, H)),
    "no batch": dict(query=zeros(0, T, N, H), key=zeros(0, S, K, H), value=zeros(0, S, K, H)),
    "integer bias": dict(bias=jnp.arange(S, dtype=jnp.int32)),
    "bool bias": dict(bias=jnp.arange(S) % 2 == 0),
    "lists": dict(
        key_value_seq_lengths=[3, 21], query_seq_lengths=[21, 4], mask=[True, False, True] * 7
    ),
    "negative window": dict(is_causal=True, local_window_size=(-1, 3)),
    "fractional window": dict(is_causal=True, local_window_size=(2.5, 0.5)),
    "traced window": dict(is_causal=True, local_window_size=(jnp.int32(3), jnp.int32(1))),
    "numpy window": dict(is_causal=True, local_window_size=(np.int64(3), np.int32(1))),
    "bool window": dict(is_causal=True, local_window_size=True),
    "list window": dict(is_causal=True, local_window_size=[3, 1]),
    "array of scales": dict(scale=np.float32([1, 2, 3] * 7).reshape(1, 1, 1, S)),
    "infinite scale": dict(scale=float("inf")),
    "numpy scale": dict(scale=np.float64(0.3)),
    "jax scale": dict(scale=jnp.float16(0.3)),
    "integer scale": dict(scale=jnp.int32(2)),
    "causal 1": dict(is_causal=1),
    "causal numpy": dict(is_causal=np.True_),
    "causal array": dict(is_causal=jnp.asarray(True)),
    "lengths out of range": dict(
        key_value_seq_lengths=np.int32([-3, 99]), query_seq_lengths=np.int32([99, -3])
    ),
}


@pytest.mark.parametrize("change", UNUSUAL)
def test_unusual_calls(dtype, change):
    """What jax.nn takes and the kernels may not: the same answer."""
    call = dict(zip(("query", "key", "value"), inputs(dtype), strict=True))
    call |= {
        n: x.astype(dtype) if n in call and x.dtype == jnp.float32 else x
        for n, x in UNUSUAL[change].items()
    }
    ours, jax_nn = both(call)
    assert ours.shape == jax_nn.shape and ours.dtype == jax_nn.dtype
    eps = float(jnp.finfo(ours.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), np.asarray(jax_nn, np.float64), atol=4 * eps, rtol=4 * eps
    )
    if change not in INHERITED:
        jax_flashattn.dot_product_attention(**call, implementation="flash")


INHERITED = {
    "one query row", "mixed ranks", "no queries", "no batch", "integer bias", "bool bias",
    "negative window", "fractional window", "traced window", "array of scales", "infinite scale",
    "causal array",
}  # fmt: skip


@pytest.mark.parametrize("change", sorted(INHERITED))
def test_flash_says_what_it_cannot_do(dtype, change):
    call = dict(zip(("query", "key", "value"), inputs("float32"), strict=True)) | UNUSUAL[change]
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(NotImplementedError, match="dot_product_attention: no flash kernel, "),
    ):
        jax_flashattn.dot_product_attention(**call, implementation="flash")


@pytest.mark.parametrize("implementation", [None, "flash"])
def test_traced(dtype, implementation):
    """Lengths and scale may be traced; the scale has a derivative, and does not round the query to its
    own dtype."""
    args = inputs(dtype)
    lengths = dict(query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS[::-1].copy())
    attention = functools.partial(
        jax_flashattn.dot_product_attention, is_causal=True, implementation=implementation
    )
    expected = attention(*args, scale=0.25, **lengths)
    for scale in (jnp.bfloat16(0.25), jnp.float32(0.25)):
        out = jax.jit(attention)(*args, scale=scale, **lengths)
        np.testing.assert_allclose(out, expected, atol=4 * float(jnp.finfo(dtype).eps))
    twice = jax.jit(attention)(*args, scale=jnp.int32(2), **lengths)
    np.testing.assert_allclose(
        twice, attention(*args, scale=2.0, **lengths), atol=4 * float(jnp.finfo(dtype).eps)
    )

    def loss(attention, scale):
        return attention(*args, scale=scale, **lengths).astype(jnp.float32).sum()

    ours, jax_nn = (
        jax.grad(functools.partial(loss, f))(jnp.float32(0.25))
        for f in (attention, functools.partial(theirs, is_causal=True))
    )
    np.testing.assert_allclose(ours, jax_nn, rtol=100 * float(jnp.finfo(dtype).eps))


def test_nan_in_padding(dtype):
    """NaN beyond the lengths reaches nothing; jax.nn lets it through."""
    args = inputs(dtype)
    lengths = dict(key_value_seq_lengths=LENGTHS)
    padded = [args[0]] + [x.at[0, LENGTHS[0] :].set(jnp.nan) for x in args[1:]]
    out = jax_flashattn.dot_product_attention(*padded, **lengths)
    np.testing.assert_array_equal(out, jax_flashattn.dot_product_attention(*args, **lengths))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_and_infinity(dtype, which, value):
    """They reach the rows that see them and no others."""
    args = list(inputs(dtype))
    args[which] = args[which].at[1, 9, 0].set(value)
    reached = np.zeros((B, T, N, H), bool)
    if which == 0:
        reached[1, 9, 0] = True
    else:
        reached[1, 9:, : N // K] = True
    out = jax_flashattn.dot_product_attention(*args, is_causal=True)
    np.testing.assert_array_equal(~np.isfinite(out), reached)


@pytest.mark.parametrize("x64", [False, True])
def test_float64(platform, x64):
    """jax.nn's softmax is float32 there; the lse of a row that sees nothing is so in every dtype."""
    with jax.enable_x64(x64):
        args = tuple(np.asarray(x, np.float64) for x in inputs("float32"))
        options = dict(key_value_seq_lengths=np.int32([0, 5]))
        out, lse = jax_flashattn.dot_product_attention(*args, **options, return_residual=True)
        assert out.dtype == lse.dtype == (jnp.float64 if x64 else jnp.float32)
    with float64():
        true_out, true_lse = exact(*map(jnp.asarray, args), **options, return_residual=True)
    atol = 1e-5 if platform.name == "cpu" else 1e-2  # XLA's products of float32 on a GPU
    np.testing.assert_allclose(out, true_out, atol=atol)
    check_residual(np.float32(lse), true_lse, jnp.dtype("float32"), atol)


# ---- any call at all


@st.composite
def calls(draw):
    """(shapes, options): a call in full, but for the numbers in it."""
    rank = draw(st.sampled_from((3, 4)))
    batch = draw(st.integers(1, 3)) if rank == 4 else 1
    t, s = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    h = draw(st.sampled_from((1, 8, 20, 32)))
    lead = (batch,) if rank == 4 else ()
    shapes = {
        "query": (*lead, t, k * group, h), "key": (*lead, s, k, h), "value": (*lead, s, k, h),
    }  # fmt: skip
    full = (batch, k * group, t, s)
    for name in ("bias", "mask"):
        if draw(st.booleans()):
            rank = draw(st.integers(1, 4))
            shapes[name] = tuple(n if draw(st.booleans()) else 1 for n in full)[-rank:]
    options = {}
    if draw(st.booleans()):
        options["is_causal"] = True
    if draw(st.booleans()):
        side = st.integers(0, 22)
        options["local_window_size"] = draw(side | st.tuples(side, side))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from((0.0, 0.5, -1.0)))
    for name, capacity in (("query_seq_lengths", t), ("key_value_seq_lengths", s)):
        if draw(st.booleans()):
            sizes = st.integers(-1, capacity + 2)
            options[name] = np.int32(draw(st.lists(sizes, min_size=batch, max_size=batch)))
    return shapes, options


def numbers(shapes, dtype, seed):
    """The five operands of those shapes; None where there is none."""
    rng = np.random.default_rng(seed)
    made = {n: jnp.asarray(rng.standard_normal(x), dtype) for n, x in shapes.items() if n != "mask"}
    if "mask" in shapes:
        made["mask"] = jnp.asarray(rng.random(shapes["mask"]) < 0.6)
    return [made.get(n) for n in ("query", "key", "value", "bias", "mask")]


seeds = st.integers(0, 99)


@contextlib.contextmanager
def where_xla_can():
    """Draws that are left to jax.nn's code count only where XLA has its products."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if not lacks_product(e):
            raise
        hypothesis.reject()


@hypothesis.given(calls(), seeds, st.booleans(), st.booleans())
@where_xla_can()
def test_any_call(dtype, call, seed, jit, residual):
    shapes, options = call
    args = numbers(shapes, dtype, seed)
    lengths = {n: x for n, x in options.items() if n.endswith("_lengths")}
    static = {n: x for n, x in options.items() if n not in lengths}
    attention = jax_flashattn.dot_product_attention
    if jit:

        def attention(*args, **options):
            run = functools.partial(
                jax_flashattn.dot_product_attention, **static, return_residual=residual
            )
            return jax.jit(run)(*args, **lengths)

    agree(args, options | dict(return_residual=residual), attention)


@hypothesis.given(calls(), seeds)
@where_xla_can()
def test_any_gradient(dtype, call, seed):
    shapes, options = call
    agree_gradients(numbers(shapes, dtype, seed), options)


@hypothesis.given(calls(), seeds)
@where_xla_can()
def test_any_tangent(dtype, call, seed):
    """Forward mode agrees with the exact derivative."""
    shapes, options = call
    args = numbers(shapes, dtype, seed)[:4]
    tangents = numbers(shapes, dtype, seed + 1)[:4]
    mask = numbers(shapes, dtype, seed)[4]

    def push(attention, args, tangents):
        @jax.jit
        def jvp(args, tangents):
            return jax.jvp(lambda *x: attention(*x, mask, **options), args, tangents)[1]

        return jvp(args, tangents)

    ours = push(jax_flashattn.dot_product_attention, args, tangents)
    with jax.numpy_dtype_promotion("standard"):
        reference = push(jax.nn.dot_product_attention, args, tangents)
    with float64():
        args, tangents = ([x if x is None else wide(x) for x in y] for y in (args, tangents))
        truth = push(exact, args, tangents)
    near(ours, reference, truth, scale=max(1, np.abs(truth).max()))


@hypothesis.given(calls(), seeds, st.data())
@where_xla_can()
def test_any_vmap(dtype, call, seed, data):
    """Any axes of any operands mapped: the same as one call after another."""
    shapes, options = call
    lengths = [options.pop(n, None) for n in ("query_seq_lengths", "key_value_seq_lengths")]
    args, other = ([*numbers(shapes, dtype, x), *lengths] for x in (seed, seed + 1))
    axes = [
        None if x is None else data.draw(st.sampled_from((None, *range(x.ndim + 1)))) for x in args
    ]
    if all(axis is None for axis in axes):
        axes[0] = 0
    stacked = [
        x if axis is None else jnp.stack([x, y], axis)
        for x, y, axis in zip(args, other, axes, strict=True)
    ]
    out_axis = data.draw(st.integers(0, len(shapes["query"])))

    def attention(*args):
        *args, q_lengths, kv_lengths = args
        return jax_flashattn.dot_product_attention(
            *args, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths, **options
        )

    out = jax.jit(jax.vmap(attention, in_axes=axes, out_axes=out_axis))(*stacked)
    for i, entry in enumerate((args, other)):
        single = [x if axis is None else y for x, y, axis in zip(args, entry, axes, strict=True)]
        np.testing.assert_allclose(
            np.take(np.asarray(out, np.float64), i, out_axis),
            np.asarray(jax.jit(attention)(*single), np.float64),
            atol=4 * float(jnp.finfo(dtype).eps),
        )
