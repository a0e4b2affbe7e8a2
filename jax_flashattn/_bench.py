"""`python -m jax_flashattn bench`: ours against jax.nn for one shape on the device at hand.

Wall-clock time of whole calls, in seconds; benchmarks/run.py measures kernels against every peer.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jax_flashattn._decode import decode
from jax_flashattn._prefill import prefill

OPERATIONS = ("prefill", "backward", "decode")


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("operation", nargs="?", choices=OPERATIONS, default="prefill")
    parser.add_argument("--batch", type=int, default=1, metavar="B")
    parser.add_argument(
        "--length", type=int, default=2048, metavar="T", help="decode: of the cache"
    )
    parser.add_argument("--heads", type=int, default=16, metavar="N")
    parser.add_argument("--kv-heads", type=int, metavar="K", help="as many as --heads by default")
    parser.add_argument("--head-dim", type=int, default=64, metavar="H")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed calls for each (1)")


def run(args: argparse.Namespace) -> int:
    operands = _operands(args)
    calls = {"jax_flashattn": _ours(args)}
    implementations = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    calls |= {f"jax.nn {name}": _jax_nn(args, name) for name in implementations}

    shape = (
        f"B {args.batch}, T {args.length}, N {args.heads}, K {_kv_heads(args)}, H {args.head_dim}"
    )
    mask = "" if args.operation == "decode" else ", full" if args.full else ", causal"
    print(f"{args.operation}, {args.dtype}, {shape}{mask}, {jax.devices()[0].device_kind}")
    print(f"{'':>14} {'us':>10} {_unit(args):>9} {'ours is':>9} {'difference':>11}")
    ours_us, ours_out = _time(calls.pop("jax_flashattn"), operands, args.seconds)
    print(_columns(args, "jax_flashattn", ours_us))
    for name, call in calls.items():
        try:
            us, out = _time(call, operands, args.seconds)
        except Exception as error:  # a refusal of a peer is a result too
            print(f"{name:>14} {' '.join(str(error).split())[:70]}")
            continue
        faster, distance = f"{us / ours_us:.2f} x", _distance(out, ours_out)
        print(f"{_columns(args, name, us)} {faster:>9} {distance:11.1e}")
    return 0


def _columns(args, name: str, us: float) -> str:
    return f"{name:>14} {us:10.1f} {_rate(args, us):9.2f}"


def _kv_heads(args) -> int:
    return args.kv_heads or args.heads


def _operands(args) -> tuple:
    query = (
        args.batch,
        1 if args.operation == "decode" else args.length,
        args.heads,
        args.head_dim,
    )
    key = (args.batch, args.length, _kv_heads(args), args.head_dim)
    shapes = [query, key, key] + ([query] if args.operation == "backward" else [])
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(random, shape, args.dtype)
        for random, shape in zip(keys, shapes, strict=True)
    )


def _ours(args):
    if args.operation == "decode":
        lengths = jnp.full((args.batch,), args.length, jnp.int32)
        return jax.jit(lambda query, key, value: decode(query, key, value, lengths))
    return _call(args, lambda query, key, value: prefill(query, key, value, causal=not args.full))


def _jax_nn(args, implementation: str):
    def attend(query, key, value):
        causal = not args.full and args.operation != "decode"
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation=implementation
        )

    return _call(args, attend)


def _call(args, attend):
    """The forward pass or, for backward, the value and its gradients."""
    if args.operation != "backward":
        return jax.jit(attend)

    def backward(query, key, value, cotangent):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(cotangent)

    return jax.jit(backward)


def _time(call, operands, seconds: float):
    """(microseconds of the median call, its result)"""
    out = jax.block_until_ready(call(*operands))
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 3:
        begin = time.perf_counter()
        jax.block_until_ready(call(*operands))
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times), out


def _unit(args) -> str:
    return "GB/s" if args.operation == "decode" else "TFLOP/s"


def _rate(args, us: float) -> float:
    if args.operation == "decode":
        item = jnp.dtype(args.dtype).itemsize
        cache = 2 * args.batch * args.length * _kv_heads(args) * args.head_dim * item
        return cache / us / 1e3
    flops = 4 * args.batch * args.heads * args.length**2 * args.head_dim
    flops *= 1 if args.full else 0.5
    return flops * (3.5 if args.operation == "backward" else 1) / us / 1e6


def _distance(out, other) -> float:
    """The largest difference between two results, whatever arrays they consist of."""
    differences = jax.tree.map(
        lambda a, b: jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max(), out, other
    )
    return float(max(jax.tree.leaves(differences)))
