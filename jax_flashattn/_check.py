"""python -m jax_flashattn check: the main job on whatever device JAX has.

Text becomes bytes, bytes become embeddings, and these go through a decoder layer of GPT-2 small's shape and
one of Qwen2.5-0.5B's. The layer's queries, keys and values are attended to as one prefill, and again
token by token through a KV cache with sequences of different lengths, both inside jax.jit; every result
is compared with float64.
"""

import dataclasses
import functools
import importlib.resources
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_flashattn._cache import KVCache, rotate
from jax_flashattn._explain import explain
from jax_flashattn._prefill import prefill


@dataclasses.dataclass(frozen=True)
class Model:
    """The attention of a decoder layer."""

    name: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_base: float | None  # None: learned positions, here random ones
    dtype: str
    dtype_on_cpu: str


MODELS = (
    # jax.nn, the yardstick, has no float16 on CPU
    Model("GPT-2 small", 768, 12, 12, 64, None, "float16", "float32"),
    Model("Qwen2.5-0.5B", 896, 14, 2, 64, 1e6, "bfloat16", "bfloat16"),
)
SEQUENCES = 3


def read_tokens(path: str | None, length: int) -> np.ndarray:
    """(SEQUENCES, length) bytes of the text from different places; the text is repeated if short."""
    if path is None:
        text = importlib.resources.files("jax_flashattn").joinpath("sample.txt").read_bytes()
    else:
        text = pathlib.Path(path).read_bytes()
    if not text:
        raise SystemExit("check: the text is empty")
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    tokens = np.tile(tokens, -(-2 * SEQUENCES * length // len(tokens)))
    return np.stack([tokens[i * len(tokens) // SEQUENCES :][:length] for i in range(SEQUENCES)])


def project(model: Model, tokens) -> list[jax.Array]:
    """Queries, keys and values of the layer, (B, T, heads, head dim) in the model's dtype."""
    dtype = model.dtype_on_cpu if jax.default_backend() == "cpu" else model.dtype
    keys = iter(jax.random.split(jax.random.key(0), 8))
    width, dim = model.width, model.head_dim
    table = jax.random.normal(next(keys), (256, width))
    x = table[tokens]
    if model.rotary_base is None:
        x = x + 0.5 * jax.random.normal(next(keys), (tokens.shape[1], width))[None]
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = (
        (x @ jax.random.normal(next(keys), (width, n * dim)) * width**-0.5)
        .reshape(*tokens.shape, n, dim)
        .astype(dtype)
        for n in heads
    )
    if model.rotary_base is not None:
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        angle = position[:, None] * model.rotary_base ** (-jnp.arange(0, dim, 2) / dim)
        tables = (jnp.cos(angle), jnp.sin(angle))
        where = jnp.broadcast_to(position, tokens.shape)
        q, k = rotate(q, where, tables), rotate(k, where, tables)
    return [q, k, v]


def truth(q, k, v) -> np.ndarray:
    """Causal attention in float64, (B, T, N, H)."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    out = np.empty_like(q)
    visible = np.tril(np.ones((q.shape[1], k.shape[1]), bool))
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            x = q[b, :, n] @ k[b, :, n].T * q.shape[-1] ** -0.5
            x = np.where(visible, x, -np.inf)
            p = np.exp(x - x.max(-1, keepdims=True))
            out[b, :, n] = p @ v[b, :, n] / p.sum(-1, keepdims=True)
    return out


def attend_with_jax_nn(cache, query):
    return jax.nn.dot_product_attention(
        query, cache.keys, cache.values, key_value_seq_lengths=cache.seq_lens
    )


def decode_all(attend, q, k, v, lengths):
    """Every row but the first half of each sequence, token by token through a cache.

    Sequence b has lengths[b] tokens; its first half is appended at once. Returns (steps, B, N, H): row i
    of sequence b is that of token lengths[b] // 2 + i, rubbish past its end.
    """
    batch, capacity, _, dim = k.shape
    start = lengths // 2
    cache = KVCache.allocate(batch, capacity, k.shape[2], dim, k.dtype)
    cache = cache.append(k, v, new_lens=start)
    sequence = jnp.arange(batch, dtype=jnp.int32)
    steps = capacity - capacity // 2

    def step(cache, i):
        at = jnp.minimum(start + i, capacity - 1)
        one = (x[sequence, at][:, None] for x in (k, v))
        cache = cache.append(*one, new_lens=(start + i < lengths).astype(jnp.int32))
        return cache, attend(cache, q[sequence, at][:, None])[:, 0]

    return jax.lax.scan(step, cache, jnp.arange(steps, dtype=jnp.int32))[1]


def seconds(function, *operands) -> float:
    """Of the fastest of three calls after the first."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(function(*operands))
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def check_model(model: Model, tokens) -> list[dict]:
    q, k, v = project(model, tokens)
    exact = truth(q, k, v)
    ulp = float(jnp.finfo(q.dtype).eps)
    ours = jax.jit(prefill)
    theirs = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    out, reference = np.asarray(ours(q, k, v)), np.asarray(theirs(q, k, v))
    xla_error = np.abs(reference.astype(np.float64) - exact).max()
    limit = 2 * xla_error + ulp * np.abs(exact).max()

    def row(operation, shape, kernel, error, difference, time_ours, time_theirs):
        return {
            "model": model.name, "operation": operation, "shape": shape, "kernel": kernel,
            "error": float(error), "limit": float(limit), "jax_nn_error": float(xla_error),
            "decode_minus_prefill": None if difference is None else float(difference), "ms": 1e3 * time_ours,
            "jax_nn_ms": None if time_theirs is None else 1e3 * time_theirs, "ok": bool(error <= limit),
        }  # fmt: skip

    shape = (
        f"B{q.shape[0]} T{q.shape[1]} N{model.heads}/{model.kv_heads} H{model.head_dim} {q.dtype}"
    )
    error = np.abs(out.astype(np.float64) - exact).max()
    rows = [
        row("prefill", shape, explain(prefill, q, k, v).kernel, error, None, seconds(ours, q, k, v),
            seconds(theirs, q, k, v))
    ]  # fmt: skip
    length = tokens.shape[1]
    lengths = np.array([length, max(length * 2 // 3, 2), max(length // 3, 2)], np.int32)
    operands = q, k, v, jnp.asarray(lengths)

    def compare(attend):
        """(function, largest error, largest difference from prefill) of token-by-token decoding."""
        stepwise = jax.jit(functools.partial(decode_all, attend))
        steps = np.asarray(stepwise(*operands)).astype(np.float64)
        error = difference = 0.0
        for b, n in enumerate(lengths):
            rows = slice(n // 2, n)
            ours = steps[: n - n // 2, b]
            error = max(error, np.abs(ours - exact[b, rows]).max())
            difference = max(difference, np.abs(ours - out[b, rows].astype(np.float64)).max())
        return stepwise, error, difference

    stepwise, error, difference = compare(KVCache.attend)
    time_theirs = None
    try:
        stepwise_xla, xla_error, _ = compare(attend_with_jax_nn)
        limit = 2 * xla_error + ulp * np.abs(exact).max()
        time_theirs = seconds(stepwise_xla, *operands)
    except (ValueError, jax.errors.JaxRuntimeError) as e:  # float16 products of some shapes
        print(f"jax.nn refuses {model.name}'s decode: {str(e).splitlines()[0]}")
    kernel = explain("decode", q[:, :1], k, v, operands[3]).kernel
    shape = f"{length - length // 2} steps, lengths {'/'.join(str(n) for n in lengths)}"
    rows.append(
        row("decode", shape, kernel, error, difference, seconds(stepwise, *operands), time_theirs)
    )  # fmt: skip
    return rows


def run(args) -> int:
    length = args.length or (128 if jax.default_backend() == "cpu" else 1024)
    if length < 2:
        raise SystemExit("check: --length must be at least 2")
    tokens = read_tokens(args.text, length)
    rows = [row for model in MODELS for row in check_model(model, tokens)]
    print(
        f"{jax.devices()[0]}: error is the largest against float64, its limit twice jax.nn's + 1 ulp"
    )
    header = (
        "model", "operation", "shape", "kernel", "error", "limit", "jax.nn's", "decode-prefill", "ms",
        "jax.nn ms", "",
    )  # fmt: skip
    table = [header] + [
        (
            r["model"], r["operation"], r["shape"], str(r["kernel"]), f"{r['error']:.2e}",
            f"{r['limit']:.2e}", f"{r['jax_nn_error']:.2e}",
            "" if r["decode_minus_prefill"] is None else f"{r['decode_minus_prefill']:.2e}",
            f"{r['ms']:.2f}", "-" if r["jax_nn_ms"] is None else f"{r['jax_nn_ms']:.2f}",
            "ok" if r["ok"] else "FAILED",
        )
        for r in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        print("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip())
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(r["ok"] for r in rows) else 1
