"""Attention for flax: `attention_fn` of nnx.MultiHeadAttention and of linen's.

nnx.MultiHeadAttention(..., attention_fn=jax_flashattn.flax.attention_fn)
"""

import math

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
    is_causal=False,
    force_fp32_for_softmax=False,
    einsum_dot_general=None,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    scale=None,
    local_window_size=None,
    implementation=None,
):
    """flax's `dot_product_attention`, computed by `jax_flashattn.dot_product_attention`.

    Args:
      query: (..., T, N, H); key and value: (..., S, K, H).
      bias, mask: broadcastable to (..., N, T, S), as flax makes them (causal, padding, decode=True).
      dropout_rate: must be 0 unless deterministic; attention dropout has no kernel.
      dtype: of the computation; that of the inputs, promoted to one, by default.
      is_causal, scale, local_window_size, implementation: as in `dot_product_attention`; flax sets the
        first, functools.partial the others.
      broadcast_dropout, dropout_rng, force_fp32_for_softmax: without effect; the softmax is always float32.
      precision: without effect, as in nnx's own function: kernels compute float32 products in float32;
        where XLA computes them (on a GPU), jax.default_matmul_precision says how.

    Raises:
      NotImplementedError: dropout; sowing the attention weights, which are never formed; einsums of
        one's own (linen's qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls).
    """
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax, precision
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
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(
                f"attention_fn: the products are the kernel's, got {name}={einsum}; use None"
            )
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    lead = query.shape[:-3]
    query, key, value = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (query, key, value))

    def fold(x):
        """(..., N, T, S), axes of size 1 and missing ones included, as rank 4."""
        x = x.reshape((1,) * (len(lead) + 3 - x.ndim) + x.shape)
        if any(n != 1 for n in x.shape[:-3]):
            x = jnp.broadcast_to(x, (*lead, *x.shape[-3:]))
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    bias = None if bias is None else fold(bias)
    mask = None if mask is None else fold(mask).astype(bool)
    out = dot_product_attention(
        query, key, value, bias, mask, is_causal=is_causal, scale=scale,
        local_window_size=local_window_size, implementation=implementation,
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[-3:])
