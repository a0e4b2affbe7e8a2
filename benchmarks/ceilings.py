"""What the device can do at best, measured in the same run as everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from timing import Call, Timer

SIZE = 8192
READ_BYTES = 1 << 30


def measure_ceilings(timer: Timer, floor) -> dict[str, float]:
    """TFLOP/s of a large matrix product, TB/s of reading, and the least time of any kernel."""
    calls = {f"matmul_{name}": _matmul(dtype) for name, dtype in _DTYPES.items()}
    for size in (READ_BYTES, 16):
        for variant, call in floor.calls(size).items():
            calls[f"read {size} {variant}"] = call
    for call in calls.values():
        call()
    measured = timer.measure(calls, rounds=15, cold=False)
    us = {name: measurement.summary()["us"] for name, measurement in measured.items()}

    def read_us(size):
        return min(time for name, time in us.items() if name.startswith(f"read {size} "))

    ceilings = {
        f"matmul_{name}_tflops": round(2 * SIZE**3 / us[f"matmul_{name}"] / 1e6, 1)
        for name in _DTYPES
    }
    ceilings["read_tbps"] = round(READ_BYTES / read_us(READ_BYTES) / 1e6, 3)
    ceilings["launch_us"] = round(read_us(16), 2)
    return ceilings


_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def _matmul(dtype) -> Call:
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (SIZE, SIZE), dtype) for key in keys)
    product = jax.jit(jnp.matmul)
    return Call(lambda _: product(left, right))
