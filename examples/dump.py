"""Writes the queries and keys of a trained model as an .npz, as real data for benchmarks and tests."""

import functools

import gpt
import jax
import jax.numpy as jnp
import numpy as np

import jax_flashattn as fa

KEY_HEADS = 4


def queries_and_keys(path, params, tokens):
    """Writes what attention gets for tokens (1, T), in the first, a middle and the last layer.

    query (layers, T, N, H) and key (layers, T, K, H) are the bits of `dtype` as uint16; K is at
    most KEY_HEADS, N their query heads. With them go the numbers of the layers and row_statistics.
    """
    forward = jax.jit(functools.partial(gpt.forward, attend=fa.prefill))
    _, (query, key) = forward(params, tokens)
    layers = np.unique([0, len(query) // 2, len(query) - 1])
    key_heads = min(KEY_HEADS, key.shape[3])
    heads = key_heads * query.shape[3] // key.shape[3]
    query, key = query[layers, 0, :, :heads], key[layers, 0, :, :key_heads]
    statistics = {name: np.asarray(x) for name, x in row_statistics(query, key).items()}
    for i, layer in enumerate(layers):
        weight = statistics["first_weight"][i, tokens.shape[1] // 2 :].mean(0)
        print(
            f"layer {layer}: largest logit {statistics['largest_logit'][i].max():.1f}; weight of the "
            f"first key {weight.mean():.3f}, in one head {weight.max():.3f} (rows of the second half)"
        )
    bits = {"query": np.asarray(query).view(np.uint16), "key": np.asarray(key).view(np.uint16)}
    np.savez(path, **bits, dtype=str(query.dtype), layer=layers, **statistics)


@jax.jit
def row_statistics(query, key):
    """Of each row of causal attention: largest logit, lse and weight of the first key, (B, T, N) float32."""
    batch, length, _, head_dim = query.shape
    _, lse = fa.prefill(query, key, key, return_lse=True)
    query = query.reshape(batch, length, key.shape[2], -1, head_dim)
    logits_of = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def largest(row):  # some rows at a time: no array of T x T
        logits = logits_of("bkgh,bskh->bkgs", query[:, row], key)
        return jnp.where(jnp.arange(length) <= row, logits, -jnp.inf).max(-1)

    top = jnp.moveaxis(jax.lax.map(largest, jnp.arange(length), batch_size=64), 0, 1)
    first = logits_of("btkgh,bkh->btkg", query, key[:, 0])
    top, first = (head_dim**-0.5 * x.reshape(lse.shape) for x in (top, first))
    return {"largest_logit": top, "lse": lse, "first_weight": jnp.exp(first - lse)}
