"""How long a call takes: kernel time from CUPTI, and the wall clock of the host beside it.

Calls of all implementations are interleaved in shuffled order, one at a time: each is waited for
before the next one starts. For cold caches every call follows a sweep over memory larger than L2.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from inputs import COLD_BYTES


@dataclasses.dataclass(frozen=True)
class Call:
    """`start(i)` launches the call on the i-th copy of the inputs, `wait` waits for its end;
    `compile()` does ahead, from any thread, what the first start would have to, and returns what it
    compiled if that is XLA's."""

    start: Callable
    wait: Callable = jax.block_until_ready
    compile: Callable = lambda: None

    def __call__(self, copy: int = 0):
        return self.wait(self.start(copy))


@dataclasses.dataclass
class Measurement:
    host_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: list[float] = dataclasses.field(default_factory=list)
    kernels: tuple[str, ...] = ()

    def summary(self) -> dict:
        """The median; the spread is the distance of the quartiles as a part of it."""
        times = self.kernel_us or self.host_us
        row = {
            "us": round(statistics.median(times), 3),
            "host_us": round(statistics.median(self.host_us), 2),
            "spread": 0.0,
        }
        if len(times) > 1:
            first, _, third = statistics.quantiles(times, n=4)
            row["spread"] = round((third - first) / row["us"], 4)
        if self.kernels:
            names = collections.Counter(name[:96] for name in self.kernels)
            row["kernels"] = dict(names)
        return row


class Timer:
    def __init__(self):
        self.cupti = _cupti()
        self._sweep: Call | None = None

    @property
    def source(self) -> str:
        return "CUPTI kernel durations" if self.cupti else "wall clock"

    def measure(self, calls: dict[str, Call], rounds: int, cold: bool, announce=lambda name: None):
        """The time of each call over `rounds` rounds; `announce` hears what is about to run."""
        measured = {name: Measurement() for name in calls}
        shuffle = random.Random(0)
        order = [n for _ in range(rounds) for n in shuffle.sample(list(calls), len(calls))]
        before = self._sweep_call() if cold else None

        for copy, name in enumerate(order):
            announce(name)
            if before:
                before()
            start = time.perf_counter()
            calls[name](copy)
            measured[name].host_us.append(1e6 * (time.perf_counter() - start))
        if self.cupti:
            self._measure_kernels(calls, order, before, measured, announce)
        return measured

    def _measure_kernels(self, calls, order, before, measured, announce):
        for name, call in calls.items():
            measured[name].kernels = tuple(name for name, _ in self.cupti(call))
        sweep_kernels = len(self.cupti(before)) if before else 0

        def run():
            for copy, name in enumerate(order):
                announce(name)
                if before:
                    before()
                calls[name](copy)

        kernels = {name: measured[name].kernels for name in calls}
        times = _attribute(self.cupti(run), order, kernels, sweep_kernels)
        if times is None:  # a library launched other kernels than before: one call at a time
            times = []
            for copy, name in enumerate(order):
                announce(name)
                if before:
                    before()
                records = self.cupti(functools.partial(calls[name], copy))
                if not records:
                    raise RuntimeError("CUPTI saw no kernel of it")
                times.append(sum(us for _, us in records))
        for name, us in zip(order, times, strict=True):
            measured[name].kernel_us.append(us)

    def _sweep_call(self) -> Call:
        if self._sweep is None:
            values = jax.random.normal(jax.random.key(0), (COLD_BYTES // 4,), jnp.float32)
            total = jax.jit(lambda x: x.sum())
            self._sweep = Call(lambda _: total(values))
            self._sweep()
        return self._sweep


def _attribute(records, order, kernels, skip: int) -> list[float] | None:
    """The sum of the kernels of each call, or None if they are not those that the calls launch.
    `skip` kernels stand before those of each call."""
    times, place = [], 0
    for name in order:
        place += skip
        ours = records[place : place + len(kernels[name])]
        if sorted(kernel for kernel, _ in ours) != sorted(kernels[name]):
            return None
        times.append(sum(us for _, us in ours))
        place += len(ours)
    return times if place == len(records) else None


def _cupti() -> Callable | None:
    """Runs a function and returns [(kernel name, microseconds)] in the order of execution."""
    if jax.default_backend() != "gpu":
        return None
    # JAX offers no public way to ask for the records of several different calls at once.
    from jax._src.lib import mosaic_gpu

    extension = mosaic_gpu._mosaic_gpu_ext

    def profile(run: Callable) -> list[tuple[str, float]]:
        extension._cupti_init()
        try:
            run()
        finally:
            records = extension._cupti_get_timings(True)
        return [(name, 1e3 * milliseconds) for name, milliseconds in records]

    return profile
