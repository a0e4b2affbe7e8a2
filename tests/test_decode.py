"""decode over contiguous caches: lengths, splits, new tokens, features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
from calls import check_decode, decode, prefill, xla_decode, xla_prefill
from cases import LENGTHS, LONG_LENGTHS, Case, DecodeCase, make_inputs
from check import check, check_lse, check_same, check_zero

import jax_flashattn

SPLITS = (1, 2, 3, 4, 7, 16)


@pytest.mark.parametrize("length", LENGTHS + LONG_LENGTHS)
def test_lengths(platform, length):
    check_decode(platform, DecodeCase(lengths=(length,), capacity=400))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_dtypes(platform, dtype, layout):
    check_decode(platform, DecodeCase(lengths=(200, 33), capacity=257, dtype=dtype, layout=layout))


@pytest.mark.parametrize(
    "head_dim,value_dim",
    [
        (8, 8),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 192),
        (256, 256),
        (192, 128),
        (576, 512),
    ],
)
def test_head_dims(platform, head_dim, value_dim):
    heads = dict(q_heads=4, kv_heads=1)
    check_decode(platform, DecodeCase(head_dim=head_dim, value_dim=value_dim, **heads))


@pytest.mark.parametrize(
    "q_heads,kv_heads", [(1, 1), (4, 4), (6, 3), (8, 1), (9, 1), (16, 1), (24, 2), (71, 1)]
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_head_ratios(platform, q_heads, kv_heads, tokens):
    check_decode(platform, DecodeCase(q_heads=q_heads, kv_heads=kv_heads, tokens=tokens))


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("length", [1, 63, 256, 300])
def test_splits(platform, num_splits, length):
    check_decode(platform, DecodeCase(lengths=(length, 300), capacity=320, num_splits=num_splits))


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_ragged(platform, num_splits):
    """Empty, negative and overlong sequences beside ordinary ones."""
    lengths = (0, 1, 512, -1, 513, 2**31 - 1, -(2**31), 200)
    check_decode(platform, DecodeCase(lengths=lengths, capacity=512, num_splits=num_splits))


@pytest.mark.parametrize("sinks", [False, True])
def test_empty_sequences(platform, sinks):
    case = platform.fit(DecodeCase(lengths=(0, 0), sinks=sinks))
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    check_zero(out)
    expected = arrays["sinks"] if sinks else np.full(case.q_heads, -np.inf)
    check_lse(lse, np.broadcast_to(expected, lse.shape))


@pytest.mark.parametrize("tokens", [2, 4, 8, 17])
@pytest.mark.parametrize("num_splits", [0, 3])
def test_several_tokens(platform, tokens, num_splits):
    """Causal among themselves; of more tokens than the sequence has, the first see nothing."""
    lengths = (tokens, tokens - 1, 1, 0, 150)
    check_decode(platform, DecodeCase(lengths=lengths, tokens=tokens, num_splits=num_splits))


@pytest.mark.parametrize("window", [0, 1, 15, 64, 10_000, (31, 0)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_windows(platform, window, tokens):
    check_decode(platform, DecodeCase(window=window, tokens=tokens, lengths=(160, 40, 3)))


def test_window_does_not_read_older_tokens(platform):
    case = platform.fit(DecodeCase(lengths=(130,), window=16))
    arrays = make_inputs(case)
    arrays["key_cache"][0, : 130 - 17] = np.nan
    arrays["value_cache"][0, : 130 - 17] = np.nan
    out, _ = decode(case, arrays)
    assert jnp.isfinite(out).all()


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_splits", [0, 4])
def test_features(platform, softcap, sinks, window, num_splits):
    features = dict(softcap=softcap, sinks=sinks, window=window, scale=0.3)
    check_decode(platform, DecodeCase(tokens=2, num_splits=num_splits, **features))


@pytest.mark.parametrize("scale", [0.0, -0.2, 1.0])
def test_scales(platform, scale):
    check_decode(platform, DecodeCase(scale=scale))


def test_constant_values_come_back(platform):
    case = DecodeCase(lengths=(257, 64), capacity=300, num_splits=3, dtype="bfloat16")
    arrays = make_inputs(case)
    arrays["value_cache"][...] = np.asarray(-0.75, arrays["value_cache"].dtype)
    out, _ = decode(case, arrays)
    check_same(out, np.full_like(out, -0.75))


def test_one_hot_query_selects_a_value(platform):
    case = platform.fit(DecodeCase(lengths=(64,), capacity=64, head_dim=64, kv_heads=1, q_heads=2))
    arrays = make_inputs(case)
    arrays["key_cache"] = np.eye(64, dtype=arrays["key_cache"].dtype)[None, :, None, :]
    arrays["query"] = 256 * arrays["key_cache"][:, [17]].repeat(2, axis=2)
    out, _ = decode(case.replace(scale=1.0), arrays)
    check_same(out[0, 0], arrays["value_cache"][0, 17].repeat(2, axis=0))


def test_equals_rows_of_prefill(platform):
    """Token t decoded over the cache is row t of a causal prefill, to the accuracy rule."""
    length = 130
    case = platform.fit(Case(batch=1, q_len=length, head_dim=64))
    q, k, v = make_inputs(case).values()
    rows, row_lse = prefill(case, dict(query=q, key=k, value=v))
    true_rows, true_lse = truth.attention(q, k, v)
    draws = xla_prefill(case, dict(query=q, key=k, value=v))
    check(rows, true_rows, draws)
    check_lse(row_lse, true_lse)
    for t in (0, 1, 63, 64, 65, 129):
        step = dict(query=q[:, t : t + 1], key_cache=k, value_cache=v, seq_lens=np.int32([t + 1]))
        decode_case = DecodeCase(lengths=(t + 1,), dtype=case.dtype)
        out, lse = decode(decode_case, step)
        check(out, true_rows[:, t : t + 1], [x[:, t : t + 1] for x in draws])
        check_lse(lse, true_lse[:, t : t + 1])


def test_several_tokens_equal_prefill_of_the_last_rows(platform):
    case = platform.fit(DecodeCase(lengths=(100, 100), capacity=100, tokens=30))
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    chunk, chunk_lse = prefill(
        Case(dtype=case.dtype),
        dict(query=arrays["query"], key=arrays["key_cache"], value=arrays["value_cache"]),
    )
    true_out, true_lse = truth.decode(**arrays)
    check(out, true_out, chunk)
    check(chunk, true_out, out)
    check_lse(chunk_lse, true_lse)
    check_lse(lse, true_lse)


def test_repeats_bitwise(platform):
    case = platform.fit(DecodeCase(lengths=(500, 3, 77), capacity=512))
    arrays = make_inputs(case)
    first = decode(case, arrays)
    for _ in range(3):
        for again, once in zip(decode(case, arrays), first, strict=True):
            check_same(again, once)


@pytest.mark.parametrize("paged", [False, True])
def test_batch_invariant(platform, paged):
    """A sequence's bits depend neither on the rest of the batch, nor its place, nor capacity."""
    lengths = (300, 5, 257, 64)
    size = 16 if paged else None
    case = platform.fit(
        DecodeCase(lengths=lengths, capacity=512, batch_invariant=True, page_size=size)
    )
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    rows = ("query", "seq_lens", "page_table") if paged else tuple(arrays)

    def pick(index):
        return {name: x[index] if name in rows else x for name, x in arrays.items()}

    for index in ([0], [1], [2, 3], [3, 2, 1, 0], [2] * 33):
        some_out, some_lse = decode(case, pick(np.array(index)))
        check_same(some_out, out[np.array(index)])
        check_same(some_lse, lse[np.array(index)])
    shorter = dict(arrays)
    if paged:
        shorter["page_table"] = arrays["page_table"][:, :20]
    else:
        shorter = {n: x[:, :320] if n.endswith("cache") else x for n, x in arrays.items()}
    check_same(decode(case, shorter)[0], out)


@pytest.mark.parametrize("batch", [1, 3, 70])
def test_batches(platform, batch):
    lengths = tuple(int(x) for x in np.random.default_rng(0).integers(0, 130, batch))
    check_decode(platform, DecodeCase(lengths=lengths, capacity=128))


@pytest.mark.parametrize("axis", ["B", "T", "S"])
@pytest.mark.parametrize("page_size", [None, 8])
def test_zero_sizes(platform, axis, page_size):
    sizes = dict(B=dict(lengths=()), T=dict(tokens=0), S=dict(capacity=0, lengths=(0, 3)))[axis]
    case = platform.fit(DecodeCase(**sizes, page_size=page_size))
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    assert out.shape == (case.batch, case.tokens, case.q_heads, case.head_dim)
    check_zero(out)
    assert (lse == -jnp.inf).all()


def test_leading_axes(platform):
    case = platform.fit(DecodeCase(lengths=(3, 100, 160, 0)))
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    folded = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in arrays.items()}
    many_out, many_lse = jax_flashattn.decode(**folded, return_lse=True)
    check_same(many_out, out.reshape(2, 2, *out.shape[1:]))
    check_same(many_lse, lse.reshape(2, 2, *lse.shape[1:]))


def test_arguments(platform):
    """Positional lengths, default scale, no lse."""
    case = platform.fit(DecodeCase(head_dim=64))
    arrays = make_inputs(case)
    out, _ = decode(case, arrays)
    check_same(jax_flashattn.decode(*arrays.values()), out)
    check_same(jax_flashattn.decode(*arrays.values(), scale=0.125), out)
    check_same(jax.jit(jax_flashattn.decode)(**arrays), out)


LATENT_HEADS = dict(head_dim=576, value_dim=512, q_heads=16, kv_heads=1, latent=True)
LATENT = DecodeCase(**LATENT_HEADS)


@pytest.mark.parametrize("q_heads", [1, 16, 20, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_latent(platform, q_heads, tokens, dtype):
    """The values are the keys' first dimensions: no value_cache."""
    check_decode(platform, LATENT.replace(q_heads=q_heads, tokens=tokens, dtype=dtype))


@pytest.mark.parametrize(
    "change",
    [
        dict(layout="BNTH"),
        dict(num_splits=3, lengths=(160, 1, 0, 129)),
        dict(batch_invariant=True),
        dict(window=40, softcap=5.0, sinks=True),
        dict(scale=0.0),
        dict(kv_heads=2),
        dict(head_dim=64, value_dim=64),
        dict(head_dim=80, value_dim=24),
        dict(head_dim=52, value_dim=33),
    ],
    ids=str,
)
def test_latent_options(platform, change):
    check_decode(platform, LATENT.replace(**change))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 192, 193, 1000])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_latent_lengths(platform, length, num_splits):
    """Around the edges of 64 keys, from one tile to several on each split."""
    lengths = (length, max(0, length - 64), 256)
    check_decode(platform, LATENT.replace(lengths=lengths, capacity=1024, num_splits=num_splits))


@pytest.mark.parametrize("page_size", [None, 64])
def test_latent_batch_invariant(platform, page_size):
    lengths = (300, 5, 257, 64)
    case = LATENT.replace(lengths=lengths, capacity=512, batch_invariant=True, page_size=page_size)
    case = platform.fit(case)
    arrays = make_inputs(case)
    out, lse = decode(case, arrays)
    rows = ("query", "seq_lens") + (("page_table",) if page_size else ("key_cache",))
    for index in ([0], [1], [2, 3], [3, 2, 1, 0], [2] * 33):
        some = {name: x[np.array(index)] if name in rows else x for name, x in arrays.items()}
        some_out, some_lse = decode(case, some)
        check_same(some_out, out[np.array(index)])
        check_same(some_lse, lse[np.array(index)])


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
def test_latent_8_bit(platform, cache_dtype):
    """One scale, the keys', for both."""
    check_decode(platform, LATENT.replace(cache_dtype=cache_dtype, dtype="bfloat16"))


def test_latent_equals_a_copy_of_the_values(platform):
    case = platform.fit(LATENT.replace(lengths=(300, 5), capacity=300, num_splits=2))
    arrays = make_inputs(case)
    copied = dict(arrays, value_cache=arrays["key_cache"][..., :512])
    expected = jax_flashattn.decode(**copied, num_splits=2)
    check(decode(case, arrays)[0], truth.decode(**arrays, **case.options())[0], expected)


@pytest.mark.parametrize(
    "change,kernel",
    [
        (dict(), "lean"),
        (dict(sinks=True), "lean"),
        (dict(window=160), "lean"),  # hides nothing
        (dict(tokens=4, q_heads=8), "lean"),
        (dict(page_size=16, head_dim=128), "lean"),
        (dict(page_size=32), "lean"),
        (dict(window=40), "featured lean"),
        (dict(window=40, tokens=4, q_heads=8, softcap=5.0, sinks=True), "featured lean"),
        (dict(window=7, head_dim=256, layout="BNTH"), "featured lean"),
        (dict(softcap=5.0), "featured lean"),
        (dict(page_size=16), "featured lean"),
        (dict(page_size=7, head_dim=128, tokens=3, q_heads=8), "featured lean"),
        (dict(page_size=1, window=33), "featured lean"),
        (dict(tokens=2), "general"),
        (dict(tokens=9), "general"),
        (dict(head_dim=80), "general"),
        (dict(cache_dtype="int8"), "general"),
        (dict(cache_dtype="float8_e4m3fn", page_size=16, scales="page"), "general"),
        (LATENT_HEADS, "latent"),
        (LATENT_HEADS | dict(sinks=True, tokens=3, layout="BNTH"), "latent"),
        (LATENT_HEADS | dict(page_size=8), "latent"),
        (LATENT_HEADS | dict(page_size=128, num_splits=2), "latent"),
        (LATENT_HEADS | dict(page_size=24), "general"),
        (LATENT_HEADS | dict(window=40), "general"),
        (LATENT_HEADS | dict(softcap=5.0), "general"),
        (LATENT_HEADS | dict(cache_dtype="int8"), "general"),
        (LATENT_HEADS | dict(latent=False), "general"),
    ],
)
def test_kernels_of_hopper(platform, change, kernel):
    """The result, and which kernel explain names for an H200."""
    base = DecodeCase(head_dim=64, lengths=(160, 33, 0), dtype="bfloat16")
    case = base.replace(**change)
    check_decode(platform, case)
    explanation = jax_flashattn.explain(
        "decode", **make_inputs(case), **case.options(), platform="cuda"
    )
    if explanation.kernel is None:
        pytest.skip(explanation.reason)
    device = jax.devices()[0]
    if device.platform == "gpu" and not str(device.compute_capability).startswith("9."):
        pytest.skip("no Hopper GPU")
    assert explanation.details.startswith(f"{kernel} kernel, ")


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_merge(platform, parts, layout):
    """Results over disjoint parts of the cache, an empty one among them, merge to the whole."""
    case = platform.fit(DecodeCase(lengths=(160, 160), tokens=1, layout=layout))
    arrays = make_inputs(case)
    axis = 1 if layout == "BTNH" else 2
    edges = [0, 50, 50, 160] if parts == 3 else [0, 77, 160]
    outs, lses = [], []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        part = dict(arrays, seq_lens=np.full(2, end - begin, np.int32))
        for name in ("key_cache", "value_cache"):
            part[name] = np.take(arrays[name], range(begin, end), axis=axis)
        out, lse = decode(case, part)
        outs.append(out)
        lses.append(lse)
    out, lse = jax_flashattn.merge(outs, lses, layout=layout)
    true_out, true_lse = truth.decode(**arrays, **case.options())
    check(out, true_out, xla_decode(case, arrays))
    check_lse(lse, true_lse)


def test_merge_ignores_what_sees_no_key(platform):
    """Whatever an output with lse -inf holds, it reaches neither the result nor a gradient."""
    good = jnp.ones((1, 2, 2, 8), platform.dtype)
    rubbish, empty = jnp.full_like(good, jnp.nan), jnp.full((1, 2, 2), -jnp.inf)

    def merged(good, lse):
        return jax_flashattn.merge([rubbish, good], [empty, lse])

    out, lse = merged(good, jnp.zeros((1, 2, 2)))
    check_same(out, good)
    check_zero(lse)
    d_good, d_lse = jax.grad(
        lambda *x: sum(y.astype(jnp.float32).sum() for y in merged(*x)), (0, 1)
    )(good, jnp.zeros((1, 2, 2)))
    check_same(d_good, jnp.ones_like(good))
    check_same(d_lse, jnp.ones((1, 2, 2)))
