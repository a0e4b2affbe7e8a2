"""Attention for flax: `attention_fn` of nnx.MultiHeadAttention and of linen's.

nnx.MultiHeadAttention(..., attention_fn=jax_flashattn.flax.attention_fn)
"""

import jax.numpy as jnp

from jax_flashattn._nn import dot_product_attention


def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    **kwargs,
):
    """flax's `dot_product_attention`, computed by `jax_flashattn.dot_product_attention`.

    Args:
      query: (..., T, N, H); key and value: (..., S, K, H).
      bias, mask: broadcastable to (..., N, T, S), as flax makes them (causal, padding, decode=True).
      dropout_rate: must be 0 unless deterministic; attention dropout has no kernel.
      dtype: of the computation; that of the inputs by default.
      is_causal and the other keywords of `dot_product_attention` are passed on. broadcast_dropout,
        dropout_rng, precision and module have no meaning here and are accepted, since flax passes them.

    Raises:
      NotImplementedError: dropout, or sowing the attention weights, which are never formed.
    """
    del broadcast_dropout, dropout_rng, precision
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"attention_fn: dropout has no kernel, got dropout_rate={dropout_rate}; use 0, or "
            "deterministic=True"
        )
    if module is not None:
        raise NotImplementedError(
            "attention_fn: the attention weights are never formed and cannot be sown; "
            "use sow_weights=False"
        )
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    lead = query.shape[:-3]
    if len(lead) > 1:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))

        def fold(x):
            if x is None:
                return None
            full = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
            return full.reshape(-1, *x.shape[-3:])

        bias, mask = fold(bias), fold(mask)
    if mask is not None:
        mask = mask.astype(bool)
    out = dot_product_attention(query, key, value, bias, mask, **kwargs)
    return out.reshape(*lead, *out.shape[-3:])
