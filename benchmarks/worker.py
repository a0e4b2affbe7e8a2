"""The process that measures. It reports every step over a pipe: when a library takes the process
down, or hangs, the one who started it (supervise.py) knows which, and can go on without it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import os
import signal
import time

from cases import Case

COMPILATION = "compilation"  # stands for an implementation while all of them are compiled


@dataclasses.dataclass
class Job:
    benchmark: str
    cases: list[Case]
    implementations: list[str]
    rounds: int
    deadline: float  # by time.time(); no case is begun after it
    ceilings: bool = True
    skip: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)


def run(job: Job, pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # JAX is imported here and not above: the process that started this one must not hold a GPU.
    from environment import describe

    worker = Worker(job, pipe)
    worker.send("meta", meta=describe(job.implementations) | {"timer": worker.timer.source})
    if job.ceilings:
        worker.measure_ceilings()
    for case in job.cases:
        if time.time() > job.deadline:
            break
        worker.run_case(case)
    worker.send("done")


class Worker:
    def __init__(self, job: Job, pipe):
        from timing import Timer

        self.job, self.pipe, self.timer = job, pipe, Timer()
        self._floor, self._current = None, ""

    def send(self, event: str, **what):
        self.pipe.send({"event": event} | what)

    def measure_ceilings(self):
        from ceilings import measure_ceilings

        self.send("step", case="ceilings", implementation="ceilings")
        try:
            self.send("meta", meta={"ceilings": measure_ceilings(self.timer, self.floor)})
        except Exception as error:
            self.send("meta", meta={"ceilings": {}, "ceilings_reason": failure_reason(error)})

    @property
    def floor(self):
        from stream import StreamReader

        if self._floor is None:
            self._floor = StreamReader()
        return self._floor

    def run_case(self, case: Case):
        import peers
        from inputs import Inputs
        from truth import Truth

        self.send("case", case=case.name)
        self._step(case, "inputs")
        cold = case.benchmark == "decode" and self.timer.cupti is not None
        try:
            inputs = Inputs(case, cold)
            truth = Truth(inputs)
        except Exception as error:
            self._stop_if_broken(error)
            for name in self.job.implementations:
                self._gap(case, name, failure_reason(error))
            self.send("case done", case=case.name)
            return
        variants, calls, facts = {}, {}, {}
        for name in self.job.implementations:
            if reason := self.job.skip.get((case.name, name)):
                self._gap(case, name, reason)
                continue
            with self._gap_on_failure(case, name):
                variants[name] = peers.variants(name, inputs)
        memory = self._compile(case, variants)
        for name in variants:
            with self._gap_on_failure(case, name):
                calls[name], facts[name] = self._choose(name, variants[name], truth, cold)
                facts[name] |= memory.get((name, facts[name].get("variant", "")), {})
        if self._times:
            self._time(case, calls, facts, cold)
        else:
            for name in calls:
                self.send("row", row=case.describe() | {"impl": name} | facts[name])
        self.send("case done", case=case.name)
        del inputs, truth, variants, calls
        _free_memory()

    @contextlib.contextmanager
    def _gap_on_failure(self, case, name):
        self._step(case, name)
        try:
            yield
        except Exception as error:
            self._stop_if_broken(error)
            self._gap(case, name, failure_reason(error))

    def _compile(self, case, variants) -> dict:
        """All at once: it takes most of the time of a run, and none of it is measured. What fails
        here fails again, and is told, when it is called. Returns what is known of memory."""
        memory = {}
        if (case.name, COMPILATION) in self.job.skip:
            return memory
        self._step(case, COMPILATION)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            running = {
                pool.submit(call.compile): (name, variant)
                for name, named in variants.items()
                for variant, call in named.items()
            }
            for done in concurrent.futures.as_completed(running):
                self._step(case, COMPILATION)
                if not done.exception() and done.result() is not None:
                    memory[running[done]] = _memory(done.result())
        return memory

    def _choose(self, name, variants, truth, cold):
        """The fastest variant of an implementation among those that give the right result."""
        from peers import Refused

        right, errors, reasons = {}, {}, []
        for variant, call in variants.items():
            try:
                errors[variant] = truth.error(call())
                if self._times and self.timer.cupti and not self.timer.cupti(call):
                    raise RuntimeError("CUPTI saw no kernel of it")
                right[variant] = call
            except Exception as error:
                reasons.append(failure_reason(error))
        if not right:
            raise Refused(reasons[0])
        variant = self._fastest(right, cold) if self._times else next(iter(right))
        facts = {"max_error": errors[variant]}
        if name == "flash":
            facts |= {"error_bound": truth.bound, "within_bound": errors[variant] <= truth.bound}
        if variant:
            facts["variant"] = variant
        return right[variant], facts

    @property
    def _times(self) -> bool:
        return "numerics" not in self.job.benchmark

    def _fastest(self, calls, cold) -> str:
        if len(calls) == 1:
            return next(iter(calls))
        measured = self.timer.measure(calls, rounds=5, cold=cold)
        return min(calls, key=lambda variant: measured[variant].summary()["us"])

    def _time(self, case, calls, facts, cold):
        self._step(case, "floor")
        try:
            floors = self.floor.calls(case.bytes)
            variant = self._fastest(floors, cold)
            calls["floor"], facts["floor"] = floors[variant], {"variant": variant}
        except Exception as error:
            self._gap(case, "floor", failure_reason(error))
        self.send("timing", case=case.name)
        for name, measurement in self._measure(case, calls, cold).items():
            row = {"impl": name} | measurement.summary()
            if name != "floor":
                row["tflops"] = round(case.flops / row["us"] / 1e6, 2)
            row["gbps"] = round(case.bytes / row["us"] / 1e3, 1)
            self.send("row", row=case.describe() | row | facts[name])

    def _measure(self, case, calls, cold):
        """Times all calls together; without one that fails here after all, and the rest again."""
        while calls:
            try:
                for name, call in calls.items():
                    self._step(case, name)
                    call(0)
                    call(1)
                announce = functools.partial(self._step, case)
                return self.timer.measure(calls, self.job.rounds, cold, announce)
            except Exception as error:
                self._stop_if_broken(error)
                self._gap(case, self._current, failure_reason(error))
                del calls[self._current]
        return {}

    def _stop_if_broken(self, error: Exception):
        """After some errors of a kernel nothing runs on the device any more in this process."""
        import jax.numpy as jnp

        try:
            jnp.zeros(1).block_until_ready()
        except Exception:
            self.send("fatal", reason=failure_reason(error))
            raise error from None

    def _step(self, case: Case, implementation: str):
        self._current = implementation
        self.send("step", case=case.name, implementation=implementation)

    def _gap(self, case: Case, implementation: str, reason: str):
        self.send("row", row=gap(case, implementation, reason))


def gap(case: Case, implementation: str, reason: str) -> dict:
    return case.describe() | {"impl": implementation, "us": None, "reason": reason}


def failure_reason(error: Exception) -> str:
    """The first line of what an exception says, with its type where the text alone says little."""
    text = " ".join(str(error).split("\n", 1)[0].split())[:200]
    if type(error).__name__ == "Refused":
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _memory(compiled) -> dict:
    """What a call allocates beside its operands, as XLA has planned it."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    return {"memory_bytes": plan.temp_size_in_bytes + plan.output_size_in_bytes}


def _free_memory():
    import sys

    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
