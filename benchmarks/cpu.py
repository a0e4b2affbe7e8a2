"""The CPU benchmark: ours beside jax.nn, each measurement in a process of its own.

Of its own because the peak of a process's memory cannot be taken back. The two take turns.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

TURNS = 3
CALL_SECONDS = 2.0  # of repeated calls in a turn
LIMIT_SECONDS = 600
IMPLEMENTATIONS = ("flash", "xla")


def events(job) -> Iterator[dict]:
    yield {"event": "meta", "meta": _ask({"describe": True})}
    while job.cases and time.time() < job.deadline:
        case = job.cases[0]
        turns = {name: [] for name in IMPLEMENTATIONS}
        for _ in range(TURNS):
            for name, results in turns.items():
                yield {"event": "step", "case": case.name, "implementation": name}
                results.append(_measure(case, name))
        for name, results in turns.items():
            yield {"event": "row", "row": _row(case, name, results)}
        job.cases.pop(0)
        yield {"event": "case done", "case": case.name}


def _row(case, name: str, results: list[dict]) -> dict:
    failed = [result for result in results if "reason" in result]
    row = case.describe() | {"impl": name}
    if failed:
        return row | {"us": None, "reason": failed[0]["reason"]}
    times = [us for result in results for us in result["times"]]
    us = statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4)
    return row | {
        "us": round(us, 1),
        "host_us": round(us, 1),
        "spread": round((third - first) / us, 4),
        "tflops": round(case.flops / us / 1e6, 4),
        "gbps": round(case.bytes / us / 1e3, 2),
        "peak_mb": round(statistics.median(result["peak_mb"] for result in results), 1),
        "max_error": results[0]["max_error"],
        "error_bound": results[0]["error_bound"],
        "within_bound": results[0]["max_error"] <= results[0]["error_bound"],
    }


def _measure(case, name: str) -> dict:
    fields = {"benchmark": case.benchmark, "dtype": case.dtype, "causal": case.causal}
    shape = {axis: getattr(case, axis) for axis in "BTSNKH"}
    try:
        return _ask({"case": fields | shape, "implementation": name})
    except subprocess.TimeoutExpired:
        return {"reason": f"no answer for {LIMIT_SECONDS} s"}
    except subprocess.CalledProcessError as error:
        return {"reason": f"crashed (exit code {error.returncode})"}


def _ask(question: dict) -> dict:
    """Has this file run as a program answer."""
    command = [sys.executable, str(pathlib.Path(__file__)), json.dumps(question)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=LIMIT_SECONDS, check=True
    )
    return json.loads(answer.stdout.splitlines()[-1])


def _answer(question: dict) -> dict:
    if question.get("describe"):
        import environment

        return environment.describe(IMPLEMENTATIONS) | {"timer": "wall clock"}
    try:
        return _measure_here(question)
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _measure_here(question: dict) -> dict:
    import peers
    from cases import Case
    from inputs import Inputs
    from truth import Truth

    inputs = Inputs(Case(**question["case"]), cold=False)
    (call,) = peers.variants(question["implementation"], inputs).values()
    call()  # compiles
    result, peak_mb = _peak_growth(call)
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < CALL_SECONDS or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    truth = Truth(inputs)
    return {
        "times": times,
        "peak_mb": peak_mb,
        "max_error": truth.error(result),
        "error_bound": truth.bound,
    }


def _peak_growth(call):
    """The result of a call, and by how many MiB the memory of the process rose for it."""
    process = pathlib.Path("/proc/self")
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for itself would not be counted
        (process / "clear_refs").write_text("5")  # Linux counts the peak from now on
        before = _resident_kib("VmRSS")
        result = call()
        return result, max(0, _resident_kib("VmHWM") - before) / 1024
    except (
        OSError,
        AttributeError,
    ):  # another system, or forbidden in this container: the peak since the start
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = call()
        return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _resident_kib(field: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0])


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
