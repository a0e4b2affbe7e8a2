"""The problems that tests and benchmarks share: what a call looks like and the data it gets.

Data is hostile on purpose. Whatever a call must not read is NaN (queries and keys beyond a length,
keys that nobody sees, unused cache, unused pages), unused page ids are huge, and inputs are shifted
by half so that outputs are far from zero and a lost term shows.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import truth
from hypothesis import strategies as st

# Lengths around the edges of every tile that a kernel might use.
SHORT_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81)
LENGTHS = SHORT_LENGTHS + (113, 127, 128, 129, 191, 192, 193)
LONG_LENGTHS = (239, 255, 256, 257, 383, 385)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128)
GROUPS = ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2), (8, 1), (7, 1))  # query heads, key heads
RUBBISH_PAGE = 2147480000


@dataclasses.dataclass(frozen=True)
class Case:
    """A prefill call. bias and mask name the axes that they do not broadcast over, like "B__S"."""

    batch: int = 2
    q_len: int = 65
    kv_len: int | None = None  # q_len unless given
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None  # head_dim unless given
    dtype: str = "float32"
    layout: str = "BTNH"
    causal: bool = True
    scale: float | None = None
    window: Any = None
    softcap: float | None = None
    alignment: str = "bottom_right"
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    bias: str | None = None
    mask: str | None = None
    segments: int | None = None  # how many
    alibi: bool = False
    sinks: bool = False

    def __str__(self):
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return "-".join(
            f"{name}={value}"
            for name, value in dataclasses.asdict(self).items()
            if value != defaults[name]
        )

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    @property
    def keys(self):
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def values(self):
        return self.head_dim if self.value_dim is None else self.value_dim

    def options(self):
        """The static arguments of the call, defaults left out."""
        options = {
            "causal": self.causal,
            "layout": self.layout,
            "scale": self.scale,
            "local_window_size": self.window,
            "logit_softcap": self.softcap,
            "causal_alignment": self.alignment,
        }
        unset = {"layout": "BTNH", "causal_alignment": "bottom_right"}
        return {name: x for name, x in options.items() if x != unset.get(name)}


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A decode call; page_size makes it paged."""

    lengths: tuple[int, ...] = (65, 1, 128)
    capacity: int = 160
    tokens: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    dtype: str = "float32"
    layout: str = "BTNH"
    scale: float | None = None
    window: Any = None
    softcap: float | None = None
    sinks: bool = False
    page_size: int | None = None
    cache_dtype: str | None = None  # the query's unless given
    scales: str = "head"  # of an 8-bit cache: by "head" or by "page"
    latent: bool = False  # no value_cache: the values are the keys' first value_dim dimensions
    num_splits: int = 0
    batch_invariant: bool = False

    __str__ = Case.__str__
    replace = Case.replace
    values = Case.values

    @property
    def batch(self):
        return len(self.lengths)

    def options(self):
        options = {
            "scale": self.scale,
            "local_window_size": self.window,
            "logit_softcap": self.softcap,
            "value_dim": self.values if self.latent else None,
        }
        options = {name: x for name, x in options.items() if x is not None}
        return options if self.layout == "BTNH" else dict(options, layout=self.layout)

    def launch_options(self):
        """Options that change how the kernel works, not what it computes: the oracles lack them."""
        options = {}
        if self.num_splits:
            options["num_splits"] = self.num_splits
        if self.batch_invariant:
            options["batch_invariant"] = True
        return options


def make_inputs(case, seed=0, poison=True):
    """The array arguments of the call that `case` describes, by name, in numpy."""
    make = _decode_inputs if isinstance(case, DecodeCase) else _prefill_inputs
    return make(case, np.random.default_rng(seed), poison)


def make_cotangents(case, seed=1):
    """(dout, dlse) of a prefill case. Rows without a key get some too: they must not matter."""
    rng = np.random.default_rng(seed)
    shape = _shape(case.layout, case.batch, case.q_len, case.q_heads)
    dout = _cast(rng.standard_normal(shape + (case.values,)), case.dtype)
    wide = np.float64 if case.dtype == "float64" else np.float32
    return dout, rng.standard_normal(shape).astype(wide)


def _prefill_inputs(case, rng, poison):
    b, t, s = case.batch, case.q_len, case.keys
    shapes = {
        "query": (t, case.q_heads, case.head_dim),
        "key": (s, case.kv_heads, case.head_dim),
        "value": (s, case.kv_heads, case.values),
    }
    arrays = {
        name: _cast(_normal(rng, _shape(case.layout, b, *shape[:2]) + shape[2:]), case.dtype)
        for name, shape in shapes.items()
    }
    full = dict(B=b, N=case.q_heads, T=t, S=s)
    if case.bias is not None:
        arrays["bias"] = _cast(rng.standard_normal(_broadcast_shape(case.bias, full)), case.dtype)
    if case.mask is not None:
        arrays["mask"] = rng.random(_broadcast_shape(case.mask, full)) < 0.7
    if case.q_lengths is not None:
        arrays["query_seq_lengths"] = np.asarray(case.q_lengths, np.int32)
    if case.kv_lengths is not None:
        arrays["key_value_seq_lengths"] = np.asarray(case.kv_lengths, np.int32)
    if case.segments is not None:
        for name, length in (("query_segment_ids", t), ("key_value_segment_ids", s)):
            ids = np.sort(rng.integers(0, case.segments, (b, length)), axis=1)
            arrays[name] = ids.astype(np.int32)
    if case.alibi:
        arrays["alibi_slopes"] = (2.0 ** -np.arange(1, case.q_heads + 1)).astype(np.float32)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.q_heads).astype(np.float32)
    if poison:
        _poison_prefill(case, arrays)
    return arrays


def _poison_prefill(case, arrays):
    visible = truth.visible_keys(**arrays, **case.options())
    query_alive = visible.any(axis=3)  # (B, N, T)
    group = case.q_heads // case.kv_heads
    grouped = visible.reshape(case.batch, case.kv_heads, group * case.q_len, case.keys)
    key_seen = grouped.any(axis=2)  # (B, K, S)
    if case.layout == "BTNH":
        query_alive, key_seen = query_alive.swapaxes(1, 2), key_seen.swapaxes(1, 2)
    arrays["query"][~query_alive] = np.nan
    arrays["key"][~key_seen] = np.nan
    arrays["value"][~key_seen] = np.nan
    if "bias" in arrays:
        arrays["bias"][~truth.any_over_broadcast(visible, arrays["bias"].shape)] = np.nan


def _decode_inputs(case, rng, poison):
    b, size, capacity = case.batch, case.page_size, case.capacity
    cache_dtype = case.cache_dtype or case.dtype
    query_shape = _shape(case.layout, b, case.tokens, case.q_heads) + (case.head_dim,)
    arrays = {"query": _cast(_normal(rng, query_shape), case.dtype)}
    if size is None:
        entries, length = b, capacity
    else:
        max_pages = -(-capacity // size)
        entries, length = b * max_pages + 3, size
    caches = {
        name: _cache(rng, (entries, length, case.kv_heads, dim), cache_dtype)
        for name, dim in (("key_cache", case.head_dim), ("value_cache", case.values))
    }
    used = np.clip(case.lengths, 0, capacity)
    written = np.zeros((entries, length), bool)
    if size is None:
        written[:] = np.arange(length) < used[:, None]
    else:
        page_table = rng.permutation(entries)[: b * max_pages].reshape(b, max_pages)
        page_table = page_table.astype(np.int32)
        for row, tokens in zip(page_table, used, strict=True):
            for token in range(tokens):
                written[row[token // size], token % size] = True
            row[-(-tokens // size) :] = RUBBISH_PAGE if poison else 0
        arrays["page_table"] = page_table
    if poison and cache_dtype != "int8":
        for cache in caches.values():
            cache[~written] = np.nan
    if case.layout == "BNTH":
        caches = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in caches.items()}
    arrays.update(caches)
    arrays["seq_lens"] = np.asarray(case.lengths, np.int32)
    if cache_dtype in ("int8", "float8_e4m3fn"):
        shape = (case.kv_heads,) if case.scales == "head" else (entries, case.kv_heads)
        low, high = (0.01, 0.02) if cache_dtype == "int8" else (0.5, 1.0)
        for name in ("key_scale", "value_scale"):
            arrays[name] = rng.uniform(low, high, shape).astype(np.float32)
            if poison and case.scales == "page":
                arrays[name][~written.any(axis=1)] = np.nan
    if case.latent:
        arrays["value_cache"] = None
        arrays.pop("value_scale", None)
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.q_heads).astype(np.float32)
    return arrays


def _cache(rng, shape, dtype):
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return _cast(_normal(rng, shape), dtype)


def _normal(rng, shape):
    return rng.standard_normal(shape) + 0.5


def _cast(x, dtype):
    return np.array(x).astype(jnp.dtype(dtype))


def _shape(layout, batch, length, heads):
    return (batch, length, heads) if layout == "BTNH" else (batch, heads, length)


def _broadcast_shape(axes, full):
    """ "B__S" -> (B, 1, 1, S)."""
    return tuple(full[name] if axis == name else 1 for name, axis in zip("BNTS", axes, strict=True))


# --- hypothesis


@st.composite
def prefill_cases(draw, lengths=LENGTHS, **fixed):
    """Any small prefill call; `fixed` pins fields."""
    q_heads, kv_heads = draw(st.sampled_from(GROUPS))
    q_len = draw(st.sampled_from(lengths))
    kv_len = draw(st.sampled_from((q_len, *lengths)))
    batch = draw(st.integers(1, 3))
    limit = st.one_of(st.none(), st.integers(0, 2 * max(lengths)))
    fields = dict(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        dtype=draw(st.sampled_from(("float32", "float16", "bfloat16"))),
        layout=draw(st.sampled_from(("BTNH", "BNTH"))),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(limit, limit))),
        softcap=draw(st.sampled_from((None, None, 5.0, 30.0))),
        alignment=draw(st.sampled_from(("bottom_right", "top_left"))),
        q_lengths=draw(_length_tuples(batch, q_len)),
        kv_lengths=draw(_length_tuples(batch, kv_len)),
        bias=draw(st.sampled_from((None, None, "BNTS", "_NTS", "B__S"))),
        mask=draw(st.sampled_from((None, None, "BNTS", "__TS", "B__S"))),
        segments=draw(st.sampled_from((None, None, 3))),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )
    return Case(**{**fields, **fixed})


@st.composite
def decode_cases(draw, lengths=LENGTHS + LONG_LENGTHS, **fixed):
    """Any small decode call; `fixed` pins fields."""
    q_heads, kv_heads = draw(st.sampled_from(GROUPS))
    batch = draw(st.integers(1, 4))
    capacity = draw(st.sampled_from(lengths))
    one_length = st.one_of(st.sampled_from((*lengths, 0, -3)), st.integers(0, capacity))
    fields = dict(
        lengths=tuple(draw(one_length) for _ in range(batch)),
        capacity=capacity,
        tokens=draw(st.sampled_from((1, 1, 2, 3, 5))),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((32, 64, 80, 128))),
        dtype=draw(st.sampled_from(("float32", "float16", "bfloat16"))),
        layout=draw(st.sampled_from(("BTNH", "BNTH"))),
        window=draw(st.one_of(st.none(), st.integers(0, capacity))),
        softcap=draw(st.sampled_from((None, None, 20.0))),
        sinks=draw(st.booleans()),
        num_splits=draw(st.sampled_from((0, 0, 1, 2, 3, 7))),
        page_size=draw(st.sampled_from((None, None, 1, 3, 16, 64))),
    )
    return DecodeCase(**{**fields, **fixed})


def _length_tuples(batch, capacity):
    edge = st.sampled_from((0, 1, capacity, capacity + 5, -1))
    one = st.one_of(st.integers(0, capacity), edge)
    return st.one_of(st.none(), st.tuples(*[one] * batch))
