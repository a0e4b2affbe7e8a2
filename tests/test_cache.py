"""KVCache: append in place, attend, at capacity, paged, 8-bit, with rotary."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import truth
import xla
from calls import xla_decode
from cases import Case, DecodeCase, make_inputs
from check import check, check_lse, check_same

import jax_flashattn
from jax_flashattn import KVCache

BATCH, CAPACITY, HEADS, KV_HEADS, DIM = 3, 40, 4, 2, 16


def tokens(platform, count, layout="BTNH", seed=0, batch=BATCH):
    """(query, key, value) of `count` new tokens."""
    case = platform.fit(
        Case(
            batch=batch, q_len=count, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, layout=layout
        )
    )
    return tuple(jnp.asarray(x) for x in make_inputs(case, seed).values())


def empty(platform, layout="BTNH", page_size=None, **options):
    dtype = options.pop("dtype", platform.dtype)
    if page_size is None:
        return KVCache.allocate(BATCH, CAPACITY, KV_HEADS, DIM, dtype, layout=layout, **options)
    table = np.random.default_rng(0).permutation(BATCH * CAPACITY // page_size)
    return KVCache.allocate_paged(
        table.size,
        page_size,
        table.reshape(BATCH, -1),
        KV_HEADS,
        DIM,
        dtype,
        layout=layout,
        **options,
    )


def contents(cache):
    """Keys and, unless latent, values by position, (B, capacity, K, H), as numpy."""
    stored = [
        np.asarray(x if cache.layout == "BTNH" else x.swapaxes(1, 2))
        for x in (cache.keys, cache.values)
        if x is not None
    ]
    if cache.page_table is None:
        return stored
    table = np.asarray(cache.page_table)
    return [x[table].reshape(BATCH, CAPACITY, *x.shape[2:]) for x in stored]


CACHES = pytest.mark.parametrize("page_size", [None, 1, 8])
LAYOUTS = pytest.mark.parametrize("layout", ["BTNH", "BNTH"])


@CACHES
@LAYOUTS
def test_append_puts_tokens_behind_the_others(platform, page_size, layout):
    cache = empty(platform, layout, page_size)
    assert cache.capacity == CAPACITY
    assert (cache.seq_lens == 0).all() and cache.seq_lens.dtype == jnp.int32
    expected = [np.zeros((BATCH, CAPACITY, KV_HEADS, DIM)) for _ in range(2)]
    at = np.zeros(BATCH, int)
    for i, new_lens in enumerate(([5, 0, 3], [1, 1, 1], [2, 7, 7])):
        _, key, value = tokens(platform, 7, layout, seed=i)
        cache = cache.append(key, value, new_lens=jnp.asarray(new_lens))
        for kept, x in zip(expected, (key, value), strict=True):
            x = np.asarray(x if layout == "BTNH" else x.swapaxes(1, 2))
            for b, n in enumerate(new_lens):
                kept[b, at[b] : at[b] + n] = x[b, :n]
        at += new_lens
        np.testing.assert_array_equal(cache.seq_lens, at)
        for ours, kept in zip(contents(cache), expected, strict=True):
            np.testing.assert_array_equal(ours, kept)


@CACHES
@LAYOUTS
def test_decoding_token_by_token_equals_prefill(platform, page_size, layout):
    """The whole loop under jit, the cache donated from step to step."""
    length = 20
    q, k, v = tokens(platform, length, layout)
    axis = 1 if layout == "BTNH" else 2

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q, return_lse=True)

    cache, outs, lses = empty(platform, layout, page_size), [], []
    for t in range(length):
        token = [jax.lax.slice_in_dim(x, t, t + 1, axis=axis) for x in (q, k, v)]
        cache, (out, lse) = step(cache, *token)
        outs.append(out)
        lses.append(lse)
    out, lse = (jnp.concatenate(x, axis=axis) for x in (outs, lses))
    true_out, true_lse = truth.attention(q, k, v, layout=layout)
    check(out, true_out, jax_flashattn.prefill(q, k, v, layout=layout))
    check_lse(lse, true_lse)


@CACHES
def test_chunks(platform, page_size):
    """A prompt appended in one piece, then a few tokens at once."""
    q, k, v = tokens(platform, 30)
    cache = empty(platform, page_size=page_size).append(k[:, :25], v[:, :25])
    cache = cache.append(k[:, 25:], v[:, 25:])
    out, lse = cache.attend(q[:, 25:], return_lse=True)
    true_out, true_lse = truth.attention(q, k, v)
    check(out, true_out[:, 25:], jax_flashattn.prefill(q, k, v)[:, 25:])
    check_lse(lse, true_lse[:, 25:])


@CACHES
@LAYOUTS
def test_append_at_capacity(platform, page_size, layout):
    """What does not fit is dropped; everything else stays as it was."""
    _, key, value = tokens(platform, CAPACITY, layout)
    lens = jnp.asarray([CAPACITY, CAPACITY - 2, 5])
    cache = empty(platform, layout, page_size).append(key, value, new_lens=lens)
    before = contents(cache)
    _, key, value = tokens(platform, 4, layout, seed=1)
    cache = cache.append(key, value)
    np.testing.assert_array_equal(cache.seq_lens, [CAPACITY, CAPACITY, 9])
    for old, new, x in zip(before, contents(cache), (key, value), strict=True):
        x = np.asarray(x if layout == "BTNH" else x.swapaxes(1, 2))
        check_same(new[0], old[0])
        check_same(new[1, :-2], old[1, :-2])
        check_same(new[1, -2:], x[1, :2])
        check_same(new[2, :5], old[2, :5])
        check_same(new[2, 5:9], x[2])
        check_same(new[2, 9:], old[2, 9:])
    full = cache.append(key, value)
    assert (full.seq_lens[:2] == CAPACITY).all()


@CACHES
@LAYOUTS
def test_append_to_lengths_out_of_range(platform, page_size, layout):
    """They count as decode counts them: a negative length as 0, one beyond the capacity as full."""
    _, key, value = tokens(platform, 4, layout)
    cache = empty(platform, layout, page_size).append(*tokens(platform, 20, layout, seed=1)[1:])

    def appended(lengths):
        start = dataclasses.replace(cache, seq_lens=jnp.asarray(lengths, jnp.int32))
        return start.append(key, value)

    clamped = appended([0, CAPACITY, 5])
    for a, b in zip(
        jax.tree.leaves(appended([-1, CAPACITY + 7, 5])), jax.tree.leaves(clamped), strict=True
    ):
        check_same(a, b)
    np.testing.assert_array_equal(clamped.seq_lens, [4, CAPACITY, 9])


@pytest.mark.parametrize("rubbish", [-1, -(2**31), 10**6, 2147480000])
def test_append_to_a_missing_page(platform, rubbish):
    """A page outside the pool: its tokens are dropped, no other page is touched."""
    cache = empty(platform, page_size=8)
    table = np.array(cache.page_table)
    table[1, 1] = rubbish
    broken = dataclasses.replace(cache, page_table=jnp.asarray(table))
    _, key, value = tokens(platform, 20)
    whole, partial = cache.append(key, value), broken.append(key, value)
    missing = int(cache.page_table[1, 1])
    for kept, ours in ((whole.keys, partial.keys), (whole.values, partial.values)):
        expected = np.array(kept)
        expected[missing] = 0
        np.testing.assert_array_equal(ours, expected)


def test_pages_shared_between_sequences_are_left_alone(platform):
    """Appending to one sequence does not touch pages that only others own."""
    cache = empty(platform, page_size=8)
    _, key, value = tokens(platform, 8)
    cache = cache.append(key, value)
    again = cache.append(key, value, new_lens=jnp.asarray([1, 0, 0]))
    changed = np.unique(np.argwhere(np.asarray(again.keys != cache.keys))[:, 0])
    np.testing.assert_array_equal(changed, [int(cache.page_table[0, 1])])


@CACHES
@LAYOUTS
@pytest.mark.parametrize("latent", [False, True])
def test_donation_reuses_the_buffers(platform, page_size, layout, latent):
    _, key, value = tokens(platform, 1, layout)
    value = None if latent else value
    append = jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0)
    cache = append(empty(platform, layout, page_size, latent=latent), key, value)
    old = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.keys, cache.values))]
    cache = append(cache, key, value)
    new = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((cache.keys, cache.values))]
    assert new == old
    text = append.lower(cache, key, value).compile().as_text()
    size = "x".join(map(str, cache.keys.shape))
    assert "input_output_alias" in text and f"copy({size}" not in text


def test_without_donation_the_old_cache_is_unchanged(platform):
    _, key, value = tokens(platform, 3)
    cache = empty(platform).append(key, value)
    before = np.array(cache.keys)
    jax.jit(lambda c: c.append(key, value))(cache)
    np.testing.assert_array_equal(cache.keys, before)


@CACHES
def test_scan(platform, page_size):
    """The cache as the carry of lax.scan equals the cache of a Python loop."""
    q, k, v = tokens(platform, 12)
    steps = tuple(jnp.moveaxis(x, 1, 0)[:, :, None] for x in (q, k, v))

    def step(cache, token):
        q, k, v = token
        cache = cache.append(k, v)
        return cache, cache.attend(q)

    cache, outs = jax.jit(lambda c: jax.lax.scan(step, c, steps))(
        empty(platform, page_size=page_size)
    )
    out = jnp.moveaxis(outs[:, :, 0], 0, 1)
    check(out, truth.attention(q, k, v)[0], jax_flashattn.prefill(q, k, v))
    assert (cache.seq_lens == 12).all()


def test_while_loop(platform):
    q, k, v = tokens(platform, 1)

    def body(cache):
        return cache.append(k, v)

    cache = jax.jit(lambda c: jax.lax.while_loop(lambda c: c.seq_lens[0] < 9, body, c))(
        empty(platform)
    )
    assert (cache.seq_lens == 9).all()
    check_same(cache.keys[:, 8], k[:, 0])


def test_is_a_pytree(platform):
    cache = empty(platform, page_size=8)
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 4
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, KVCache) and again.layout == cache.layout
    assert jax.tree.structure(empty(platform, "BNTH")) != jax.tree.structure(empty(platform))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@CACHES
def test_8_bit(platform, dtype, page_size):
    """Stored as token / scale, rounded and saturated; attended with the scale."""
    q, k, v = tokens(platform, 30)
    largest = {"float8_e4m3fn": 448.0, "int8": 127.0}[dtype]
    scales = [np.float32([0.03, 0.05]), np.float32([0.04, 0.03])]
    cache = empty(
        platform, page_size=page_size, dtype=dtype, key_scale=scales[0], value_scale=scales[1]
    ).append(k, v)
    for stored, x, scale in zip(contents(cache), (k, v), scales, strict=True):
        exact = np.asarray(x, np.float64) / scale[None, None, :, None]
        stored = np.asarray(stored, np.float64)[:, :30]
        assert np.isfinite(stored).all()
        error = np.abs(stored - np.clip(exact, -largest, largest))
        step = 0.5 if dtype == "int8" else np.maximum(np.abs(exact) * 2**-4, 2**-10)
        quotient = np.abs(exact) * 2**-22  # float32, in which a half may be met or missed
        assert (error <= step + quotient).all()
    arrays = dict(query=q[:, 29:], key_cache=cache.keys, value_cache=cache.values)
    arrays |= dict(seq_lens=cache.seq_lens, key_scale=scales[0], value_scale=scales[1])
    if page_size:
        arrays["page_table"] = cache.page_table
    check(
        cache.attend(q[:, 29:]),
        truth.decode(**arrays)[0],
        xla_decode(DecodeCase(dtype=platform.dtype), arrays),
    )


@CACHES
@LAYOUTS
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_latent(platform, page_size, layout, dtype):
    """Keys alone are stored; their first dimensions come back as values."""
    q, k, _ = tokens(platform, 30, layout)
    scale = None if dtype is None else np.float32([0.03, 0.05])
    cache = empty(
        platform, layout, page_size, dtype=dtype or platform.dtype, latent=True, value_dim=8,
        key_scale=scale,
    )  # fmt: skip
    assert cache.values is None and len(jax.tree.leaves(cache)) == 2 + bool(page_size) + bool(dtype)
    cache = cache.append(k)
    kept = contents(cache)[0][:, :30]
    if dtype is None:
        np.testing.assert_array_equal(kept, k if layout == "BTNH" else k.swapaxes(1, 2))
    arrays = dict(query=q, key_cache=cache.keys, value_cache=None, seq_lens=cache.seq_lens)
    if page_size:
        arrays["page_table"] = cache.page_table
    if dtype:
        arrays["key_scale"] = scale
    options = dict(layout=layout, value_dim=8)
    check(
        cache.attend(q),
        truth.decode(**arrays, **options)[0],
        xla.decode(**arrays, **options),
    )


def test_latent_rotary(platform):
    """The dimensions behind the values turn, those of the values do not."""
    tables = tuple(f(np.arange(64.0)[:, None] * np.float32([1, 0.1])) for f in (np.cos, np.sin))
    _, key, _ = tokens(platform, 5)
    latent = empty(platform, latent=True, value_dim=8).append(key, rotary=tables)
    (stored,) = contents(latent)
    position = jnp.broadcast_to(jnp.arange(5), (BATCH, 5))
    np.testing.assert_array_equal(
        stored[:, :5, :, 8:], jax_flashattn.rotate(key[..., 8:], position, tables)
    )
    np.testing.assert_array_equal(stored[:, :5, :, :8], key[..., :8])


@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
@LAYOUTS
def test_rotary_in_append(platform, rotated, layout):
    """Keys are turned by their own position, in the sequence, not in the chunk."""
    angle = np.arange(64)[:, None] * 10000.0 ** (-2 * np.arange(rotated // 2) / rotated)
    tables = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    cache = empty(platform, layout)
    lens = [3, 0, 7]
    _, key, value = tokens(platform, 7, layout)
    cache = cache.append(key, value, new_lens=jnp.asarray(lens), rotary=tables)
    cache = cache.append(key, value, rotary=tables)
    plain = np.asarray(key if layout == "BTNH" else key.swapaxes(1, 2), np.float64)
    stored = np.asarray(contents(cache)[0], np.float64)
    half = rotated // 2
    for b, start in enumerate(lens):
        turned = plain[b].copy()
        for t in range(7):
            c, s = (f(angle[start + t])[None] for f in (np.cos, np.sin))
            left, right = plain[b, t, :, :half], plain[b, t, :, half:rotated]
            turned[t, :, :half] = left * c - right * s
            turned[t, :, half:rotated] = right * c + left * s
        eps = float(jnp.finfo(key.dtype).eps)
        np.testing.assert_allclose(stored[b, start : start + 7], turned, atol=8 * eps, rtol=2 * eps)


def test_rotary_tables_in_numpy(platform):
    """Constants of a jitted step may be numpy's."""
    angle = np.arange(64, dtype=np.float32)[:, None] / np.arange(1, 9, dtype=np.float32)
    tables = np.cos(angle), np.sin(angle)
    _, key, value = tokens(platform, 3)

    @jax.jit
    def append(cache):
        return cache.append(key, value, rotary=tables)

    position = jnp.broadcast_to(jnp.arange(3), (BATCH, 3))
    turned = jax_flashattn.rotate(key, position, tuple(jnp.asarray(x) for x in tables))
    stored = contents(append(empty(platform)))[0][:, :3]
    eps = float(jnp.finfo(key.dtype).eps)
    np.testing.assert_allclose(stored, turned, atol=8 * eps, rtol=2 * eps)


def test_vmap(platform):
    """Two batches of caches side by side."""
    q, k, v = tokens(platform, 5)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), empty(platform))
    pair = tuple(jnp.stack([x, -x]) for x in (q, k, v))

    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache.attend(q)

    outs = jax.vmap(step)(caches, *pair)
    for i, sign in enumerate((1, -1)):
        check(
            outs[i],
            truth.attention(sign * q, sign * k, sign * v)[0],
            jax_flashattn.prefill(sign * q, sign * k, sign * v),
        )


@pytest.mark.parametrize(
    "key,value",
    [
        ((BATCH, 1, 3, DIM), None),
        ((BATCH + 1, 1, KV_HEADS, DIM), None),
        (None, (BATCH, 2, KV_HEADS, DIM)),
        (None, (BATCH, 1, KV_HEADS, 8)),
        ((KV_HEADS, DIM), None),
        ((BATCH, KV_HEADS, DIM), (BATCH, KV_HEADS, DIM)),
    ],
)
def test_append_errors(platform, key, value):
    good = (BATCH, 1, KV_HEADS, DIM)
    k, v = (jnp.zeros(shape or good, platform.dtype) for shape in (key, value))
    with pytest.raises(ValueError, match="^KVCache.append: (key|value) .*, got .*; "):
        empty(platform).append(k, v)


def test_append_errors_of_latent(platform):
    key = jnp.zeros((BATCH, 1, KV_HEADS, DIM), platform.dtype)
    latent = empty(platform, latent=True, value_dim=8)
    for cache, new in ((latent, (key, key)), (empty(platform), (key,))):
        with pytest.raises(ValueError, match="^KVCache.append: value goes .*, got .*; "):
            cache.append(*new)


def test_allocate_errors(platform):
    with pytest.raises(ValueError, match="^KVCache: layout .*, got .*; "):
        KVCache.allocate(1, 8, 1, 8, layout="X")
    with pytest.raises(ValueError, match="^KVCache: key_scale.*, got .*; "):
        KVCache.allocate(1, 8, 1, 8, "int8")
    with pytest.raises(ValueError, match="^KVCache: key_scale.*, got .*; "):
        KVCache.allocate(1, 8, 1, 8, "float16", key_scale=np.ones(1), value_scale=np.ones(1))
    with pytest.raises(ValueError, match="^KVCache: value_dim .*, got .*; "):
        KVCache.allocate(1, 8, 1, 8, latent=True, value_dim=9)
    with pytest.raises(ValueError, match="^KVCache: key_scale.*, got .*; "):
        KVCache.allocate(
            1, 8, 1, 8, "int8", latent=True, key_scale=np.ones(1), value_scale=np.ones(1)
        )
    for scale in (0.5, np.ones(2), np.ones((1, 1))):
        with pytest.raises(ValueError, match="^KVCache: key_scale .*, got .*; "):
            KVCache.allocate(1, 8, 1, 8, "int8", key_scale=scale, value_scale=np.ones(1))
    with pytest.raises(ValueError, match="^KVCache: page_table .*, got .*; "):
        KVCache.allocate_paged(4, 8, np.zeros(4, np.int32), 1, 8)
    with pytest.raises(TypeError, match="^KVCache: page_table .*, got .*; "):
        KVCache.allocate_paged(4, 8, np.zeros((2, 2), np.float32), 1, 8)
    for dtype in ("int32", "float8_e5m2"):
        with pytest.raises(TypeError, match="^KVCache: dtype .*, got .*; "):
            KVCache.allocate(1, 8, 1, 8, dtype)


def test_append_of_what_is_no_array(platform):
    _, key, value = tokens(platform, 1)
    for new in (([1.0], value), (key, [1.0]), (key.astype(jnp.int32), value)):
        with pytest.raises(TypeError, match="^KVCache.append: (key|value) .*, got .*; "):
            empty(platform).append(*new)


@pytest.mark.parametrize(
    "rotary",
    [
        (np.ones((40, 4)),) * 3,
        np.ones((40, 4)),
        (np.ones((40, 4)), np.ones((40, 8))),
        (np.ones((40, DIM // 2 + 1)),) * 2,
    ],
)
def test_rotary_errors(platform, rotary):
    _, key, value = tokens(platform, 1)
    with pytest.raises(ValueError, match="^rotate: rotary .*, got .*; "):
        empty(platform).append(key, value, rotary=rotary)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_append_to_lengths_of_any_integer_dtype(platform, dtype):
    """A capacity that the dtype cannot hold does not wrap them."""
    cache = jax_flashattn.KVCache.allocate(2, 300, 2, 16, jnp.float16)
    cache = dataclasses.replace(cache, seq_lens=jnp.asarray([100, 120], dtype))
    tokens = jnp.ones((2, 8, 2, 16), jnp.float16)
    grown = cache.append(tokens, tokens)
    assert grown.seq_lens.dtype == jnp.int32
    np.testing.assert_array_equal(grown.seq_lens, [108, 128])
    np.testing.assert_array_equal(np.asarray(grown.keys[:, :, 0, 0]).sum(1), [8, 8])
    assert grown.keys[0, 100, 0, 0] == 1 and grown.keys[1, 127, 0, 0] == 1


@pytest.mark.parametrize("page_size", [None, 4])
def test_append_to_numpy_leaves(platform, page_size):
    """As jax.device_get leaves a cache, and with a page table of numpy's under jit."""
    tokens = jnp.ones((2, 3, 2, 16), jnp.float16)
    table = np.arange(8, dtype=np.int32).reshape(2, 4)
    cache = (
        jax_flashattn.KVCache.allocate_paged(8, page_size, table, 2, 16, jnp.float16)
        if page_size
        else jax_flashattn.KVCache.allocate(2, 16, 2, 16, jnp.float16)
    )
    expected = cache.append(tokens, tokens)
    fetched = jax.device_get(cache)
    grown = [fetched.append(tokens, tokens)]
    if page_size:
        replaced = jax.jit(lambda c, x: dataclasses.replace(c, page_table=table).append(x, x))
        grown.append(replaced(cache, tokens))
    for ours in grown:
        jax.tree.map(check_same, ours, expected)
