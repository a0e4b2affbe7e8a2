"""The inputs of a case, in as many copies as it takes to find them cold in L2: random normal ones,
unless its `data` says otherwise."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case

COLD_BYTES = 256 << 20  # more than four times the L2 cache of any GPU of today
KEY_BLOCK = 128  # as many keys as most kernels take at a time
EIGHT_BIT_SCALE = {"float8_e4m3fn": 1 / 64, "int8": 1 / 32}


class Inputs:
    """`operands(i)` is the i-th copy of (query, key, value), for backward with the cotangent of the
    output behind them; with several layers, key and value are tuples of arrays. Where the values are
    inside the keys, value is None. What is small is shared by all copies: lengths, slopes, sinks, ...;
    `extra` holds it under the names of the package's arguments.
    """

    def __init__(self, case: Case, cold: bool):
        self.case = case
        copies = 1
        if case.benchmark == "decode" and cold:
            copies = max(2, -(-COLD_BYTES // case.bytes) + 1)
        self._operands = [_operands(case, seed) for seed in range(copies)]
        self.extra = _extra(case)
        jax.block_until_ready((self._operands, self.extra))

    @property
    def copies(self) -> int:
        return len(self._operands)

    def operands(self, copy: int) -> tuple:
        return self._operands[copy % self.copies]

    @functools.cached_property
    def torch_operands(self) -> list[tuple]:
        """The same memory as torch tensors, in torch's order (batch, heads, length, dim)."""
        import torch

        if jax.default_backend() != "gpu":
            raise NotImplementedError("torch is measured on a GPU only")
        return [
            tuple(torch.from_dlpack(x).transpose(1, 2) for x in operands)
            for operands in self._operands
        ]


def _operands(case: Case, seed: int) -> tuple:
    if case.layers > 1:
        one = dataclasses.replace(case, features=())
        layers = [_operands(one, seed * case.layers + i) for i in range(case.layers)]
        (query, *_), (_, keys, values) = layers[0], zip(*layers, strict=True)
        return query, keys, values
    keys_and_values = [(case.B, case.S, case.K, dim) for dim in (case.H, case.value_dim)]
    shapes = [(case.B, case.T, case.N, case.H), *keys_and_values]
    if case.benchmark == "backward":
        shapes.append((case.B, case.T, case.N, case.value_dim))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    query, key, value, *cotangent = (
        _normal(random, shape, case.dtype) for random, shape in zip(keys, shapes, strict=True)
    )
    if case.data:
        query, key = _with_data(case.data, query, key)
    if cache := case.feature("cache"):
        key, value = (_quantise(x, cache) for x in (key, value))
    if page_size := case.feature("page"):
        key, value = (_paged(x, page_size) for x in (key, value))
    if case.feature("layout") == "BNTH":
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    if case.benchmark == "decode" and case.feature("value_dim"):
        value = None
    return (query, key, value, *cotangent)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(random, shape, dtype):
    return jax.random.normal(random, shape, dtype)


def _with_data(data, query, key):
    """Queries and keys (B, T, N, H) whose logits are far apart, the larger the earlier the key: causal
    kernels commonly go from the last block of keys to the first, so a running maximum keeps rising.
    """
    name, value = data
    if name == "query_scale":  # the standard deviation of the logits
        return query * value, key
    if name == "key_ramp":  # the factor of the first key; that of the last is 0.2
        factor = jnp.linspace(value, 0.2, key.shape[1]).astype(key.dtype)
        return query, key * factor[None, :, None, None]
    if name == "key_blocks":  # the weights of a block of keys are 2^value times those of the next
        blocks_behind = np.arange(key.shape[1])[::-1] // KEY_BLOCK
        logit = (np.log(2) * value * blocks_behind).astype(key.dtype)
        query = query.at[..., 0].set(query.shape[-1] ** 0.5)  # times the scale: 1
        return query, key.at[..., 0].set(logit[None, :, None])
    if name == "file":
        with np.load(value) as file:
            return tuple(jnp.asarray(file[name].view(query.dtype)) for name in ("query", "key"))
    raise ValueError(f"there is no data {name!r}")


@functools.partial(jax.jit, static_argnums=1)
def _quantise(x, dtype):
    scaled = x.astype(jnp.float32) / EIGHT_BIT_SCALE[dtype]
    return (jnp.round(scaled).clip(-127, 127) if dtype == "int8" else scaled).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _paged(x, page_size):
    """The pages of all sequences in the order of `page_order`."""
    batch, length, heads, dim = x.shape
    pages = x.reshape(batch * length // page_size, page_size, heads, dim)
    return pages[np.argsort(page_order(pages.shape[0]))]


def page_order(pages: int) -> np.ndarray:
    """Where in the pool the pages lie, in the order of the tokens."""
    return np.random.default_rng(0).permutation(pages)


def _extra(case: Case) -> dict:
    generator = np.random.default_rng(1)
    extra = {}
    for name, value in case.features:
        if name == "window":
            extra["local_window_size"] = (value, 0)
        elif name == "softcap":
            extra["logit_softcap"] = value
        elif name == "sinks":
            extra["sinks"] = generator.standard_normal(case.N, np.float32)
        elif name == "alibi":
            slopes = np.exp2(-8 * (np.arange(case.N) + 1) / case.N)
            extra["alibi_slopes"] = slopes.astype(np.float32)
        elif name == "bias":
            extra["bias"] = _normal(jax.random.key(1), (1, case.N, case.T, case.S), case.dtype)
        elif name == "mask":
            rows = case.T if value == "rows" else 1
            extra["mask"] = generator.random((case.B, 1, rows, case.S), np.float32) < 0.75
        elif name == "segments":
            ids = np.arange(case.T) * value // case.T
            ids = np.broadcast_to(ids, (case.B, case.T)).astype(np.int32)
            extra["query_segment_ids"] = extra["key_value_segment_ids"] = ids
        elif name == "lengths" and case.benchmark != "decode":
            lengths = np.asarray(case.lengths, np.int32)
            extra["query_seq_lengths"] = extra["key_value_seq_lengths"] = lengths
        elif name == "value_dim" and case.benchmark == "decode":
            extra["value_dim"] = value
        elif name == "page":
            pages = case.B * case.S // value
            extra["page_table"] = page_order(pages).reshape(case.B, -1).astype(np.int32)
        elif name == "cache":
            scale = np.full(case.K, EIGHT_BIT_SCALE[value], np.float32)
            extra["key_scale"] = extra["value_scale"] = scale
    if case.benchmark == "decode":
        extra["seq_lens"] = np.asarray(case.lengths, np.int32)
    return {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in extra.items()
    }
