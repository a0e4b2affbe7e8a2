"""Packed batches: documents of any length one behind the other, told apart by segment ids."""

import jax.numpy as jnp
import numpy as np

from jax_flashattn import _arguments as arguments


def segment_ids(cu_seqlens_q, q_len, cu_seqlens_kv=None, kv_len=None):
    """The segment ids of packed documents, from the offsets `cu_seqlens` of variable-length attention.

    Document d is tokens cu_seqlens[d] ... cu_seqlens[d + 1] - 1. Offsets may be traced, documents
    empty; no longest document has to be known. Memory is O(q_len + kv_len). Packed self-attention,
    and cross-attention to other documents:

        q, k, v  # (T, N, H), (T, K, H), (T, K, H): no batch axis
        cu_seqlens = jnp.array([0, 700, 700, 1000])  # documents of 700, 0 and 300 tokens
        ids = segment_ids(cu_seqlens, T)
        out = prefill(q, k, v, **ids)  # causal in each document

        k, v  # (S, K, H)
        ids = segment_ids(cu_seqlens, T, cu_seqlens_kv, S)
        out = prefill(q, k, v, causal=False, **ids)  # every query sees its whole document

    Causal, windows and ALiBi count positions from the start of the packed sequences if T == S or
    causal_alignment="top_left". That is right inside every document if the offsets of queries and keys are
    equal, as in self-attention. Where they differ, because some document has more keys than queries, no
    alignment makes it so: such documents take causal=False here, or a batch with `query_seq_lengths` and
    `key_value_seq_lengths`.

    Args:
      cu_seqlens_q: (D + 1,) integers, the offsets of D documents among the queries: first 0, never
        falling. vmap for a batch of packed sequences.
      q_len: T, tokens of the packed sequence. Those from cu_seqlens_q[D] on belong to nobody: they see
        nothing, nothing sees them, and their output is 0. Offsets beyond T count as T.
      cu_seqlens_kv, kv_len: likewise for the keys, if they are others.

    Returns:
      {"query_segment_ids": (T,), "key_value_segment_ids": (S,)}, int32, sorted: keyword arguments of
      `prefill`.

    Raises:
      ValueError: a shape, or only one of cu_seqlens_kv and kv_len. TypeError: a dtype.
    """
    if (cu_seqlens_kv is None) != (kv_len is None):
        arguments.fail(ValueError, "segment_ids", "cu_seqlens_kv and kv_len", "go together",
                       "cu_seqlens_kv alone" if kv_len is None else "kv_len alone",
                       "pass both or neither")  # fmt: skip
    if cu_seqlens_kv is None:
        cu_seqlens_kv, kv_len = cu_seqlens_q, q_len
    offsets_q, offsets_kv = (
        _check_offsets(name, x)
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv))
    )
    if offsets_q.shape != offsets_kv.shape:
        arguments.fail(ValueError, "segment_ids", "cu_seqlens_kv", "has the wrong shape",
                       offsets_kv.shape,
                       f"it must have cu_seqlens_q's documents, {offsets_q.shape}")  # fmt: skip
    documents = offsets_q.size - 1
    queries, keys = _documents_of(offsets_q, q_len), _documents_of(offsets_kv, kv_len)
    # Tokens behind the last document are in none: number D among queries, another one among keys.
    keys = jnp.where(keys < documents, keys, documents + 1)
    return {"query_segment_ids": queries, "key_value_segment_ids": keys}


def _check_offsets(name, x):
    shape = np.shape(x)
    x = arguments.check_lengths("segment_ids", name, x, shape)
    if x.ndim != 1 or x.size == 0:
        arguments.fail(ValueError, "segment_ids", name, "has the wrong shape", shape,
                       "it must be (documents + 1,)")  # fmt: skip
    return x


def _documents_of(offsets, length):
    """Which document each token is in: the last one that starts at or before it, so never an empty one."""
    tokens = jnp.arange(length, dtype=jnp.int32)
    return jnp.searchsorted(offsets, tokens, side="right").astype(jnp.int32) - 1
