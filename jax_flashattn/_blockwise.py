"""Attention in jnp, one block of queries at a time: memory is linear in the length.

What forward-mode and second derivatives are computed with; the kernels never need it. It takes the
operands of the primitives, where an operand may have fewer batches than the call.
"""

import jax
import jax.numpy as jnp

from jax_flashattn import _arguments as arguments

BLOCK = 128


def repeat(x, batch: int):
    return x if x.shape[0] == batch else jnp.tile(x, (batch // x.shape[0],) + (1,) * (x.ndim - 1))


def score_shape(operands, options) -> tuple[int, int, int]:
    size = options.sizes(operands, operands.values())
    return size["n"], size["t"], size["s"]


def attention(operands: dict, options):
    """(out, lse) of the primitive `prefill`."""
    size = options.sizes(operands, operands.values())
    batch, t, s, n = size["b"], size["t"], size["s"], size["n"]
    operands = {name: repeat(x, batch) for name, x in operands.items()}
    heads_first = options.layout == "BNTH"
    q, k, v = (
        operands[x] if heads_first else operands[x].swapaxes(1, 2)
        for x in ("query", "key", "value")
    )
    dtype = q.dtype
    wide = arguments.wide_dtype(dtype)
    group = n // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1).astype(wide) for x in (k, v))
    q_len, kv_len = (
        jnp.clip(operands[x], 0, limit) if x in operands else jnp.full((batch,), limit, jnp.int32)
        for x, limit in (("query_seq_lengths", t), ("key_value_seq_lengths", s))
    )
    column = jnp.arange(s, dtype=jnp.int32)[None, None, None, :]
    shift = (kv_len - q_len if options.bottom_right else jnp.zeros_like(q_len))[:, None, None, None]
    # Keys that no row may see can hold anything, NaN too: a product with 0 would spread it.
    exists = column < kv_len[:, None, None, None]
    k, v = (jnp.where(exists[:, :, 0, :, None], x, 0) for x in (k, v))
    # Nor does a weight of 0 keep other values out that are not finite: the rows that see them are
    # found apart.
    odd = ~jnp.isfinite(v)
    v, odd = jnp.where(odd, 0, v), odd.astype(wide)

    blocks = 1 if t == 0 else -(-t // BLOCK)

    def block(i):
        start = i * BLOCK

        def rows(x, axis, fill=0):
            """The block's rows of an operand, padded past the end; broadcast axes stay."""
            if x.shape[axis] == 1 and t != 1:
                return x
            pad = [(0, 0)] * x.ndim
            pad[axis] = (0, blocks * BLOCK - t)
            x = jnp.pad(x, pad, constant_values=fill)
            return jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis)

        row = start + jnp.arange(BLOCK, dtype=jnp.int32)[None, None, :, None]
        real = row < q_len[:, None, None, None]
        q_block = jnp.where(real, rows(q, 2), 0).astype(wide)
        logits = options.scale * jnp.einsum("bnth,bnsh->bnts", q_block, k)
        if options.softcap:
            logits = options.softcap * jnp.tanh(logits / options.softcap)
        center = row + shift
        if "alibi_slopes" in operands:
            slopes = operands["alibi_slopes"][:, :, None, None].astype(wide)
            logits = logits - slopes * jnp.abs(center - column).astype(wide)
        if "bias" in operands:
            logits = logits + rows(operands["bias"], 2).astype(wide)
        unlimited = 2**31 - 1
        seen = exists & real
        if options.window_left != unlimited:
            seen = seen & (center - column <= options.window_left)
        if options.window_right != unlimited:
            seen = seen & (column - center <= options.window_right)
        if "mask" in operands:
            seen = seen & rows(operands["mask"], 2, False)
        if "query_segment_ids" in operands:
            ids = rows(operands["query_segment_ids"], 1)[:, None, :, None]
            seen = seen & (ids == operands["key_value_segment_ids"][:, None, None, :])
        logits = jnp.where(seen, logits, -jnp.inf)
        top = jnp.max(logits, axis=-1, initial=-jnp.inf)
        if "sinks" in operands:
            top = jnp.maximum(top, operands["sinks"][:, :, None].astype(wide))
        top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0) - top[..., None]), 0)
        total = weights.sum(-1)
        if "sinks" in operands:
            sink = jnp.exp(operands["sinks"][:, :, None].astype(wide) - top)
            total = total + jnp.where(real[..., 0], sink, 0)
        some = ~(total <= 0)  # NaN counts as something: it must reach the output
        safe = jnp.where(some, total, 1.0)
        out = jnp.einsum("bnts,bnsv->bntv", weights, v) / safe[..., None]
        shown = jnp.broadcast_to(seen, weights.shape).astype(wide)
        reached = jnp.einsum("bnts,bnsv->bntv", shown, odd) > 0
        out = out * jnp.where(reached, jnp.nan, 1).astype(wide)
        return out, jnp.where(some, jnp.log(safe) + top, -jnp.inf)

    out, lse = jax.lax.map(jax.checkpoint(block), jnp.arange(blocks, dtype=jnp.int32))

    def join(x):  # (blocks, B, N, BLOCK, ...) -> (B, N, T, ...)
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], blocks * BLOCK, *x.shape[4:])[:, :, :t]

    out, lse = join(out).astype(dtype), join(lse)
    return (out, lse) if heads_first else (out.swapaxes(1, 2), lse.swapaxes(1, 2))
