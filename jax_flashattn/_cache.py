"""KVCache: keys and values of the tokens so far, contiguous or paged; appended to in place."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_flashattn import _arguments as arguments
from jax_flashattn._decode import CACHE_8BIT, decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A pytree of the cached keys and values of a batch of sequences.

    `append` returns a new cache. Under `jax.jit` with the old one donated, or as the carry of `lax.scan` and
    `lax.while_loop`, XLA writes the new tokens into the same buffers and copies nothing.

    Attributes:
      keys: (B, S, K, H) in layout BTNH, (B, K, S, H) in BNTH; paged (pages, page_size, K, H) or
        (pages, K, page_size, H).
      values: likewise, with head dim V.
      seq_lens: (B,) int32, tokens of each sequence.
      page_table: (B, max_pages) int32 of a paged cache, else None. Which pages a sequence owns is the
        caller's to decide: replace it by `dataclasses.replace(cache, page_table=...)`.
      key_scale, value_scale: (K,) float32 of an 8-bit cache, else None: stored = token / scale.
      layout: "BTNH" or "BNTH".
    """

    keys: jax.Array
    values: jax.Array
    seq_lens: jax.Array
    page_table: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    layout: str = dataclasses.field(default="BTNH", metadata={"static": True})

    @classmethod
    def allocate(
        cls, batch, capacity, kv_heads, head_dim, dtype=jnp.bfloat16, *, value_dim=None,
        layout="BTNH", key_scale=None, value_scale=None,
    ):  # fmt: skip
        """An empty contiguous cache for `capacity` tokens a sequence."""
        return cls._empty(
            (batch, capacity), batch, None, kv_heads, head_dim, value_dim, dtype, layout, key_scale,
            value_scale,
        )  # fmt: skip

    @classmethod
    def allocate_paged(
        cls, pages, page_size, page_table, kv_heads, head_dim, dtype=jnp.bfloat16, *, value_dim=None,
        layout="BTNH", key_scale=None, value_scale=None,
    ):  # fmt: skip
        """An empty pool of pages, which `page_table` (B, max_pages) deals out to the sequences."""
        page_table = jnp.asarray(page_table).astype(jnp.int32)
        return cls._empty(
            (pages, page_size), page_table.shape[0], page_table, kv_heads, head_dim, value_dim, dtype,
            layout, key_scale, value_scale,
        )  # fmt: skip

    @classmethod
    def _empty(
        cls, lengths, batch, page_table, kv_heads, head_dim, value_dim, dtype, layout, key_scale,
        value_scale,
    ):  # fmt: skip
        arguments.check_layout("KVCache", layout)
        dtype = jnp.dtype(dtype)
        eight_bit = str(dtype) in CACHE_8BIT
        if eight_bit != (key_scale is not None) or eight_bit != (value_scale is not None):
            arguments.fail(ValueError, "KVCache", "key_scale and value_scale", "go with 8-bit dtypes",
                           dtype, f"both with {CACHE_8BIT}, else neither")  # fmt: skip

        def empty(dim):
            first, tokens = lengths
            shape = (tokens, kv_heads) if layout == "BTNH" else (kv_heads, tokens)
            return jnp.zeros((first, *shape, dim), dtype)

        scales = (
            None if x is None else jnp.asarray(x, jnp.float32) for x in (key_scale, value_scale)
        )
        return cls(
            empty(head_dim), empty(value_dim or head_dim), jnp.zeros((batch,), jnp.int32), page_table,
            *scales, layout,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can hold."""
        tokens = self.keys.shape[1 if self.layout == "BTNH" else 2]
        return tokens if self.page_table is None else tokens * self.page_table.shape[1]

    def append(self, key, value, *, new_lens=None, rotary=None) -> "KVCache":
        """The cache with T more tokens of each sequence behind those it has.

        Args:
          key: (B, T, K, H) or (B, K, T, H) by the layout; value: likewise with V.
          new_lens: (B,) integers: how many of the T tokens each sequence really has; all by default.
          rotary: (cos, sin), each (max_position, R / 2): rotates the first R of the key's H dimensions by
            the token's position, halves paired as in GPT-NeoX and Llama (Su et al. 2021, arXiv:2104.09864).

        Tokens beyond the capacity, or whose page is outside the pool, are dropped, nothing else is
        touched; seq_lens stops at the capacity.
        """
        op = "KVCache.append"
        seq, head = (1, 2) if self.layout == "BTNH" else (2, 1)
        batch = self.seq_lens.shape[0]
        for name, x, like in (("key", key, self.keys), ("value", value, self.values)):
            wanted = (batch, like.shape[head], like.shape[3])
            got = (x.shape[0], x.shape[head], x.shape[3]) if x.ndim == 4 else x.shape
            if got != wanted or x.shape[seq] != key.shape[seq]:
                arguments.fail(ValueError, op, name, "has the wrong shape", x.shape,
                               f"batch, heads and head dim must be {wanted}")  # fmt: skip
        tokens = key.shape[seq]
        step = jnp.arange(tokens, dtype=jnp.int32)[None]
        position = self.seq_lens[:, None] + step
        count = jnp.full((batch,), tokens, jnp.int32)
        if new_lens is not None:
            count = jnp.clip(arguments.check_lengths(op, "new_lens", new_lens, (batch,)), 0, tokens)
        real = step < count[:, None]
        if rotary is not None:
            key = rotate(key, position, rotary, self.layout)
        first, row = self._place(jnp.where(real, position, self.capacity))
        return dataclasses.replace(
            self,
            keys=self._write(
                self.keys, _quantize(key, self.keys, self.key_scale, head), first, row
            ),
            values=self._write(
                self.values, _quantize(value, self.values, self.value_scale, head), first, row
            ),
            seq_lens=jnp.minimum(self.seq_lens + count, self.capacity),
        )

    def _place(self, position):
        """(first axis, token axis) of the cache for each (sequence, position); outside: dropped."""
        sequence = jnp.arange(self.seq_lens.shape[0], dtype=jnp.int32)[:, None]
        if self.page_table is None:
            return jnp.broadcast_to(sequence, position.shape), position
        size = self.keys.shape[1 if self.layout == "BTNH" else 2]
        page = position // size
        inside = page < self.page_table.shape[1]
        page_id = self.page_table[sequence, jnp.where(inside, page, 0)]
        # A negative index would count from the end.
        dropped = ~inside | (page_id < 0)
        return jnp.where(dropped, self.keys.shape[0], page_id), position % size

    def _write(self, cache, tokens, first, row):
        if self.layout == "BTNH":
            return cache.at[first, row].set(tokens, mode="drop", unique_indices=True)
        tokens = tokens.swapaxes(1, 2)  # (B, T, K, H): advanced indices come first
        return cache.at[first, :, row].set(tokens, mode="drop", unique_indices=True)

    def attend(self, query, scale=None, **options):
        """`decode` of the newest tokens over this cache; append their keys and values first."""
        return decode(
            query, self.keys, self.values, self.seq_lens, scale, layout=self.layout,
            page_table=self.page_table, key_scale=self.key_scale, value_scale=self.value_scale, **options,
        )  # fmt: skip


def _quantize(x, cache, scale, head):
    if scale is None:
        return x.astype(cache.dtype)
    shape = [1] * 4
    shape[head] = -1
    x = x.astype(jnp.float32) / scale.reshape(shape)
    if cache.dtype == jnp.int8:
        return jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8)
    return jnp.clip(x, -448, 448).astype(cache.dtype)  # the conversion alone would overflow to NaN


def rotate(x, position, rotary, layout="BTNH"):
    """Rotary position embedding of x (B, T, N, H) or (B, N, T, H) at position (B, T).

    rotary: (cos, sin), each (max_position, R / 2); the first R dimensions are rotated, in float32.
    Positions are clamped to the tables.
    """
    cos, sin = (table[jnp.clip(position, 0, table.shape[0] - 1)] for table in rotary)
    at = 2 if layout == "BTNH" else 1
    cos, sin = (jnp.expand_dims(y, at).astype(jnp.float32) for y in (cos, sin))
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
