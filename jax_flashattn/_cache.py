"""KVCache: keys and values of the tokens so far, contiguous or paged; appended to in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

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
      values: likewise, with head dim V; None of a latent cache, whose values are the first value_dim
        dimensions of its keys.
      seq_lens: (B,) int32, tokens of each sequence.
      page_table: (B, max_pages) int32 of a paged cache, else None. Which pages a sequence owns is the
        caller's to decide: replace it by `dataclasses.replace(cache, page_table=...)`.
      key_scale, value_scale: (K,) float32 of an 8-bit cache, else None: stored = token / scale. A latent
        cache has key_scale alone.
      layout: "BTNH" or "BNTH".
      value_dim: V of a latent cache, else None.
    """

    keys: jax.Array
    values: jax.Array | None
    seq_lens: jax.Array
    page_table: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    layout: str = dataclasses.field(default="BTNH", metadata={"static": True})
    value_dim: int | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def allocate(
        cls, batch, capacity, kv_heads, head_dim, dtype=jnp.bfloat16, *, value_dim=None, latent=False,
        layout="BTNH", key_scale=None, value_scale=None,
    ):  # fmt: skip
        """An empty contiguous cache for `capacity` tokens a sequence.

        value_dim: V, head_dim by default. latent: no values are stored, they are the first value_dim
        dimensions of the keys, as in multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).
        """
        return cls._empty(
            (batch, capacity), batch, None, kv_heads, head_dim, value_dim, latent, dtype, layout,
            key_scale, value_scale,
        )  # fmt: skip

    @classmethod
    def allocate_paged(
        cls, pages, page_size, page_table, kv_heads, head_dim, dtype=jnp.bfloat16, *, value_dim=None,
        latent=False, layout="BTNH", key_scale=None, value_scale=None,
    ):  # fmt: skip
        """An empty pool of pages, which `page_table` (B, max_pages) deals out to the sequences."""
        shape = np.shape(page_table)
        if len(shape) != 2:
            arguments.fail(ValueError, "KVCache", "page_table", "has the wrong shape", shape,
                           "it must be (batch, max_pages)")  # fmt: skip
        page_table = arguments.check_lengths("KVCache", "page_table", page_table, shape)
        return cls._empty(
            (pages, page_size), page_table.shape[0], page_table, kv_heads, head_dim, value_dim, latent,
            dtype, layout, key_scale, value_scale,
        )  # fmt: skip

    @classmethod
    def _empty(
        cls, lengths, batch, page_table, kv_heads, head_dim, value_dim, latent, dtype, layout,
        key_scale, value_scale,
    ):  # fmt: skip
        op = "KVCache"
        arguments.check_layout(op, layout)
        dtype = jnp.dtype(dtype)
        if str(dtype) not in arguments.FLOATS + CACHE_8BIT:
            arguments.fail(TypeError, op, "dtype", "is unsupported", dtype,
                           f"allowed are {arguments.FLOATS + CACHE_8BIT}")  # fmt: skip
        eight_bit = str(dtype) in CACHE_8BIT
        wanted = (eight_bit, eight_bit and not latent)
        if wanted != (key_scale is not None, value_scale is not None):
            arguments.fail(ValueError, op, "key_scale and value_scale", "go with 8-bit dtypes", dtype,
                           f"both with {CACHE_8BIT} (latent: key_scale), else neither")  # fmt: skip
        value_dim = value_dim or head_dim
        if latent and value_dim > head_dim:
            arguments.fail(ValueError, op, "value_dim", "is too large for a latent cache", value_dim,
                           f"the keys have {head_dim} dimensions")  # fmt: skip

        def empty(dim):
            first, tokens = lengths
            shape = (tokens, kv_heads) if layout == "BTNH" else (kv_heads, tokens)
            return jnp.zeros((first, *shape, dim), dtype)

        def scale(name, x):
            if x is None:
                return None
            if np.shape(x) != (kv_heads,):
                arguments.fail(ValueError, op, name, "has the wrong shape", np.shape(x),
                               f"it must be one a key head, {(kv_heads,)}")  # fmt: skip
            return jnp.asarray(x, jnp.float32)

        scales = scale("key_scale", key_scale), scale("value_scale", value_scale)
        return cls(
            empty(head_dim), None if latent else empty(value_dim), jnp.zeros((batch,), jnp.int32),
            page_table, *scales, layout, value_dim if latent else None,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can hold."""
        tokens = self.keys.shape[1 if self.layout == "BTNH" else 2]
        return tokens if self.page_table is None else tokens * self.page_table.shape[1]

    def append(self, key, value=None, *, new_lens=None, rotary=None) -> "KVCache":
        """The cache with T more tokens of each sequence behind those it has.

        Args:
          key: (B, T, K, H) or (B, K, T, H) by the layout; value: likewise with V, None for a latent cache.
          new_lens: (B,) integers: how many of the T tokens each sequence really has; all by default.
          rotary: (cos, sin), each (max_position, R / 2): rotates the first R of the key's H dimensions by
            the token's position, halves paired as in GPT-NeoX and Llama (Su et al. 2021, arXiv:2104.09864).
            Of a latent cache, the first R behind the values.

        Tokens beyond the capacity, or whose page is outside the pool, are dropped, nothing else is
        touched; seq_lens stops at the capacity. To pages of a batch that is sharded explicitly, append
        inside `jax.shard_map`: the types of JAX's scatter do not say that each sequence writes its own.
        """
        op = "KVCache.append"
        seq, head = (1, 2) if self.layout == "BTNH" else (2, 1)
        batch = self.seq_lens.shape[0]
        if (value is None) != (self.values is None):
            arguments.fail(ValueError, op, "value", "goes with a cache that stores values",
                           "none" if value is None else np.shape(value),
                           "a latent cache takes keys alone, any other keys and values")  # fmt: skip
        dtypes = arguments.FLOATS + CACHE_8BIT
        key = arguments.check_array(op, "key", key, dtypes)
        new = [("key", key, self.keys)]
        if value is not None:
            value = arguments.check_array(op, "value", value, dtypes)
            new.append(("value", value, self.values))
        tokens = key.shape[seq] if key.ndim == 4 else 1
        for name, x, like in new:
            wanted = (batch, *like.shape[1:seq], tokens, *like.shape[seq + 1 :])
            if x.shape != wanted:
                arguments.fail(ValueError, op, name, "has the wrong shape", x.shape,
                               f"with T = {tokens} new tokens it must be {wanted}")  # fmt: skip
        step = jnp.arange(tokens, dtype=jnp.int32)[None]
        lengths = arguments.check_lengths(op, "seq_lens", self.seq_lens, (batch,))
        lengths = jnp.clip(lengths, 0, self.capacity)
        position = lengths[:, None] + step
        count = jnp.full((batch,), tokens, jnp.int32)
        if new_lens is not None:
            count = jnp.clip(arguments.check_lengths(op, "new_lens", new_lens, (batch,)), 0, tokens)
        real = step < count[:, None]
        if rotary is not None:
            first = self.value_dim or 0
            turned = rotate(key[..., first:], position, rotary, self.layout)
            key = jnp.concatenate([key[..., :first], turned], axis=-1)
        places = self._places(jnp.where(real, position, self.capacity))

        def written(cache, tokens, scale):
            return self._write(cache, _quantize(tokens, cache, scale, head), places)

        return dataclasses.replace(
            self,
            keys=written(self.keys, key, self.key_scale),
            values=None if value is None else written(self.values, value, self.value_scale),
            seq_lens=jnp.minimum(lengths + count, self.capacity),
        )

    def _places(self, position):
        """Of each token: (page, row of it), or its row in the sequence; outside, so that it is dropped."""
        if self.page_table is None:
            return position
        sequence = jnp.arange(self.seq_lens.shape[0], dtype=jnp.int32)[:, None]
        size = self.keys.shape[1 if self.layout == "BTNH" else 2]
        page = position // size
        inside = page < self.page_table.shape[1]
        page_id = jnp.asarray(self.page_table)[sequence, jnp.where(inside, page, 0)]
        # A negative index would count from the end.
        dropped = ~inside | (page_id < 0)
        return jnp.where(dropped, self.keys.shape[0], page_id), position % size

    def _write(self, cache, tokens, places):
        cache = jnp.asarray(cache)
        if self.page_table is None:
            # Sequence by sequence, so that a sharded batch stays where it is.
            def write(cache, tokens, row):
                at = cache.at[row] if self.layout == "BTNH" else cache.at[:, row]
                return at.set(tokens, mode="drop", unique_indices=True)

            return jax.vmap(write)(cache, tokens, places)
        page, row = places
        if self.layout == "BTNH":
            return cache.at[page, row].set(tokens, mode="drop", unique_indices=True)
        tokens = tokens.swapaxes(1, 2)  # (B, T, K, H): advanced indices come first
        return cache.at[page, :, row].set(tokens, mode="drop", unique_indices=True)

    def attend(self, query, scale=None, **options):
        """`decode` of the newest tokens over this cache; append their keys and values first."""
        return decode(
            query, self.keys, self.values, self.seq_lens, scale, layout=self.layout, value_dim=self.value_dim,
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


def _look_up(table, rows):
    """table[rows]; under an Explicit mesh sharded as the rows are."""
    sharding = jax.typeof(rows).sharding
    if not any(sharding.spec):
        return table[rows]
    spec = jax.sharding.PartitionSpec(*sharding.spec, None)
    return table.at[rows].get(out_sharding=jax.sharding.NamedSharding(sharding.mesh, spec))


def rotate(x, position, rotary, layout="BTNH"):
    """Rotary position embedding of x (B, T, N, H) or (B, N, T, H) at position (B, T).

    rotary: (cos, sin), each (max_position, R / 2); the first R dimensions are rotated, in float32.
    Positions are clamped to the tables.
    """
    tables = [jnp.asarray(table) for table in rotary]
    shapes = [table.shape for table in tables]
    if len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        arguments.fail(ValueError, "rotate", "rotary", "is malformed", shapes,
                       "it must be (cos, sin), each (max_position, R / 2)")  # fmt: skip
    if 2 * shapes[0][1] > x.shape[-1]:
        arguments.fail(ValueError, "rotate", "rotary", "is too wide", shapes,
                       f"R is at most the {x.shape[-1]} dimensions that are rotated")  # fmt: skip
    rows = jnp.clip(position, 0, tables[0].shape[0] - 1)
    cos, sin = (_look_up(table, rows) for table in tables)
    at = 2 if layout == "BTNH" else 1
    cos, sin = (jnp.expand_dims(y, at).astype(jnp.float32) for y in (cos, sin))
    half = cos.shape[-1]
    a, b = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
