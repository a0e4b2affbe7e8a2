"""FlashAttention for JAX: hand-written CUDA and CPU kernels as JAX primitives."""

from jax_flashattn._cache import KVCache, rotate
from jax_flashattn._decode import decode
from jax_flashattn._explain import Explanation, explain
from jax_flashattn._ffi import CUSTOM_CALLS
from jax_flashattn._merge import merge
from jax_flashattn._nn import dot_product_attention
from jax_flashattn._packing import segment_ids
from jax_flashattn._prefill import prefill

__version__ = "0.1.0"

__all__ = [
    "CUSTOM_CALLS",
    "Explanation",
    "KVCache",
    "decode",
    "dot_product_attention",
    "explain",
    "merge",
    "prefill",
    "rotate",
    "segment_ids",
]
