"""A small GPT: bytes in, logits of the next byte out; causal attention is a function that it is given.

Parameters are a dict of float32 arrays, those of all layers stacked, so that `lax.scan` runs one
compiled layer over them. Compute is in bfloat16, norms and softmax in float32.
"""

import dataclasses

import jax
import jax.numpy as jnp

import jax_flashattn as fa

VOCABULARY = 256
ROTARY_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def init(shape: Shape, key) -> dict:
    layers, width = shape.layers, shape.width
    keys = iter(jax.random.split(key, 8))

    def normal(*dims, std=0.02):
        return std * jax.random.normal(next(keys), dims)

    per_layer = {
        "attention_norm": jnp.ones((layers, width)),
        "q": normal(layers, width, shape.heads, shape.head_dim),
        "k": normal(layers, width, shape.kv_heads, shape.head_dim),
        "v": normal(layers, width, shape.kv_heads, shape.head_dim),
        "out": normal(layers, shape.heads, shape.head_dim, width, std=0.02 / (2 * layers) ** 0.5),
        "mlp_norm": jnp.ones((layers, width)),
        "up": normal(layers, width, 4 * width),
        "down": normal(layers, 4 * width, width, std=0.02 / (2 * layers) ** 0.5),
    }
    return {
        "embedding": normal(VOCABULARY, width),
        "layers": per_layer,
        "norm": jnp.ones(width),
        "head": normal(width, VOCABULARY),
    }


def forward(params, tokens, attend):
    """Logits (B, T, VOCABULARY) in float32 for tokens (B, T), and what was attended with.

    `attend(q, k, v)` is causal attention: q (B, T, N, H), k and v (B, T, K, H), result like q. The
    second result is (q, k) of all layers, each with a leading axis for the layer; it costs nothing
    where it is not used.
    """
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    head_dim = params["layers"]["q"].shape[-1]
    position = jnp.arange(tokens.shape[1])
    angle = position[:, None] * ROTARY_BASE ** (-jnp.arange(0, head_dim, 2) / head_dim)
    rotary = (jnp.cos(angle), jnp.sin(angle))
    position = jnp.broadcast_to(position, tokens.shape)

    def layer(x, w):
        y = rms_norm(x, w["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[name]) for name in "qkv")
        q, k = fa.rotate(q, position, rotary), fa.rotate(k, position, rotary)
        x = x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), w["out"])
        y = rms_norm(x, w["mlp_norm"])
        return x + jax.nn.gelu(y @ w["up"]) @ w["down"], (q, k)

    x, attended = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    x = rms_norm(x, params["norm"])
    return jnp.matmul(x, params["head"], preferred_element_type=jnp.float32), attended


def rms_norm(x, weight):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * weight
