"""Who is compared with ours; peers.py knows how each of them is called."""

from __future__ import annotations

import sys

PEERS = {
    "flash_sm80": "our generic kernel, on a GPU that has a faster one too",
    "flash_deterministic": "ours with deterministic=True (backward)",
    "cudnn": "jax.nn.dot_product_attention, cuDNN",
    "fa3": "FlashAttention-3 by flash-attn3-jax (decode: its best num_splits)",
    "tokamax": "tokamax, mosaic, its own choice of configuration",
    "tokamax_tuned": "tokamax, mosaic, autotuned for the shape",
    "pallas": "attention_mgpu of jax.experimental.pallas.ops.gpu",
    "t_cudnn": "torch scaled_dot_product_attention, cuDNN",
    "t_flash2": "torch scaled_dot_product_attention, FlashAttention-2",
    "xla": "jax.nn.dot_product_attention, XLA",
}
# The units that counters.py compares: how busy each is, in percent of what it can do.
UNITS = {
    "tensor": "matrix units",
    "xu": "exponentials",
    "fma": "FMA",
    "alu": "ALU",
    "issue": "issue slots",
    "shared": "shared memory",
    "banks": "L1 data banks",
    "l2": "L2",
    "dram": "memory",
}
OWN_VARIANTS = ("flash_sm80", "flash_deterministic")  # no peers: nobody is ahead of them or behind
# tokamax_tuned compiles a hundred kernels for each shape.
ON_REQUEST = ("tokamax_tuned", *OWN_VARIANTS)


def select(text: str) -> list[str]:
    """The peers that --peers asks for, in the order of the tables."""
    if text == "none":
        return []
    if text == "all":
        return list(PEERS)
    if text == "default":
        return [name for name in PEERS if name not in ON_REQUEST]
    asked = [name.strip() for name in text.split(",")]
    if unknown := [name for name in asked if name not in (*PEERS, "flash", "default")]:
        sys.exit(f"--peers: unknown {', '.join(unknown)}; there are {', '.join(PEERS)}")
    extra = select("default") if "default" in asked else []
    return [name for name in PEERS if name in asked or name in extra]
