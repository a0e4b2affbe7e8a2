"""Reads the hardware counters of the kernels with Nsight Compute: which unit of the GPU is busiest.

    python benchmarks/counters.py [--out DIR] [--peers cudnn,fa3] [--case SUBSTRING]

ncu runs this program again, once for each group of cases. There every implementation is called until
it is compiled and warm, and then once more between the start and the stop of the profiler; a
`stream_read` kernel before that call tells in ncu's table whose the kernels behind it are. Clocks
are left as they are. Caches are flushed before each pass for decode, whose cache is cold in service,
and not for the rest. The rows go to benchmarks/results/<device>/counters.json, for report.py.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import functools
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import cases
import environment
import names
from results import DIRECTORY, Results

ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
# field of a row: the metrics that can give it, the first that this ncu knows for this GPU is taken
METRICS = {
    "ns": ("gpu__time_duration.sum",),
    "cycles": ("sm__cycles_elapsed.max",),
    "tensor": (
        f"sm__pipe_tensor_cycles_active{ELAPSED}",
        f"sm__inst_executed_pipe_tensor{ELAPSED}",
    ),
    "xu": (f"sm__inst_executed_pipe_xu{ELAPSED}",),
    "fma": (f"sm__pipe_fma_cycles_active{ELAPSED}", f"sm__inst_executed_pipe_fma{ELAPSED}"),
    "alu": (f"sm__pipe_alu_cycles_active{ELAPSED}", f"sm__inst_executed_pipe_alu{ELAPSED}"),
    "issue": (f"smsp__issue_active{ELAPSED}", f"sm__inst_issued{ELAPSED}"),
    "shared": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared{ELAPSED}",),
    "banks": (f"l1tex__data_bank_reads{ELAPSED}",),
    "l2": (f"lts__t_sectors{ELAPSED}", f"lts__throughput{ELAPSED}"),
    "dram": ("dram__bytes.sum.pct_of_peak_sustained_elapsed", f"dram__throughput{ELAPSED}"),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "warps": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers": ("launch__registers_per_thread",),
}
STALLS = (  # of which there are columns if ncu knows them
    "barrier branch_resolve dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard "
    "math_pipe_throttle membar mio_throttle no_instruction short_scoreboard sleeping wait"
).split()
SHOWN_STALLS = 3
MARK = "stream_read"
TIMED_CALLS = 10  # that the choice between variants times
GRACE_SECONDS = 30  # for the call that is profiled when the time is over


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--peers", default="cudnn,fa3", help="as in run.py")
    parser.add_argument("--case", action="append", metavar="SUBSTRING", help="may be repeated")
    parser.add_argument("--seconds", type=float, default=150, metavar="LIMIT", help="of all (150)")
    parser.add_argument("--commit", help="what was built, where git cannot say it")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ncu ----------------------------------------------------------------------------------------------


def find_ncu() -> str:
    patterns = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
    installed = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    found = shutil.which("ncu") or (installed or [None])[-1]
    return found or sys.exit("no ncu (Nsight Compute) on the PATH")


def choose_metrics(known: str) -> tuple[dict[str, str], list[str]]:
    """{field: metric} of what this ncu knows, and the fields that it has nothing for. `known` is what
    `ncu --query-metrics` prints, a line for each metric; of the launch__ metrics it prints none."""
    listed = {line.split()[0] for line in known.splitlines() if line.strip()}
    chosen, missing = {}, []
    for field, alternatives in METRICS.items():
        usable = [m for m in alternatives if m.startswith("launch__") or m.split(".")[0] in listed]
        if usable:
            chosen[field] = usable[0]
        else:
            missing.append(field)
    for stall in STALLS:
        name = f"smsp__average_warps_issue_stalled_{stall}_per_issue_active"
        if name in listed:
            chosen[f"stall {stall}"] = f"{name}.ratio"
    if not any(field.startswith("stall ") for field in chosen):
        missing.append("stalls")
    return chosen, missing


def profile_command(ncu: str, metrics: dict, group: str, table: pathlib.Path) -> list[str]:
    return [
        *(ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)),
        *("--clock-control", "none"),
        *("--cache-control", "all" if group == "decode" else "none"),
        *("--profile-from-start", "off", "--target-processes", "application-only"),
        *("--metrics", ",".join(metrics.values())),
    ]


def read_table(text: str) -> tuple[list[dict], list[str]]:
    """The kernels, each {column: text}, and what ncu complained of."""
    complaints = [line for line in text.splitlines() if re.match("==(ERROR|WARNING)==", line)]
    start = re.search(r'^"ID",', text, re.MULTILINE)
    if not start:
        return [], complaints
    rows = [line for line in text[start.start() :].splitlines() if line.startswith('"')]
    kernels = list(csv.DictReader(rows))[1:]  # the first row holds the units
    return kernels, complaints


def by_call(kernels: list[dict]) -> list[list[dict]]:
    """The kernels behind each mark."""
    calls: list[list[dict]] = []
    for kernel in kernels:
        if kernel["Kernel Name"].startswith(MARK):
            calls.append([])
        elif calls:
            calls[-1].append(kernel)
    return calls


def kernel_rows(kernels: list[dict], metrics: dict[str, str]) -> list[dict]:
    """What the row of each kernel of one call says, the longest first."""
    rows = [_kernel_row(kernel, metrics) for kernel in kernels]
    total, seen = sum(row["us"] for row in rows), collections.Counter()
    for row in rows:
        row["share"] = round(row["us"] / total, 4)
        seen[row["kernel"]] += 1
        if seen[row["kernel"]] > 1:
            row["kernel"] += f" ({seen[row['kernel']]})"
    return sorted(rows, key=lambda row: -row["us"])


def _kernel_row(kernel: dict, metrics: dict[str, str]) -> dict:
    values = {field: _number(kernel.get(metric)) for field, metric in metrics.items()}
    ns, cycles = values.pop("ns"), values.pop("cycles", None)
    row = {"kernel": short_name(kernel["Kernel Name"]), "us": round(ns / 1e3, 3)}
    row["sm_mhz"] = round(1e3 * cycles / ns) if cycles else None
    row |= {key.lower(): kernel[key] for key in ("Block Size", "Grid Size") if key in kernel}
    stalls = {field: value for field, value in values.items() if field.startswith("stall ")}
    row |= {field: value for field, value in values.items() if field not in stalls}
    largest = sorted((name for name in stalls if stalls[name]), key=lambda name: -stalls[name])
    row["stalls"] = {n.removeprefix("stall "): stalls[n] for n in largest[:SHOWN_STALLS]}
    return row


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:  # n/a
        return None


def short_name(name: str) -> str:
    """The name of a kernel without return type, namespaces, template and function arguments."""
    if library := re.search(r"cudnn_generated_\w*?(sdpa_sm\d+_flash_[a-z]prop)", name):
        return f"cudnn_{library[1]}"
    if name.startswith("void cutlass::device_kernel") and (inner := re.search(r"Flash\w+", name)):
        return inner[0]
    head = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    return head.rsplit("::", 1)[-1].strip().removesuffix("_kernel")


# The process that ncu watches ---------------------------------------------------------------------


def child(job: dict):
    """Calls every implementation of every case of the group, ours first: a library that takes the
    process down takes nothing of ours with it."""
    import peers
    from inputs import Inputs
    from stream import StreamReader
    from worker import failure_reason

    log = functools.partial(_log, job["log"])
    log(meta=environment.describe(job["implementations"]))
    chosen = [case for case in group_cases(job["group"]) if case.name in job["cases"]]
    floor = StreamReader()
    mark = next(iter(floor.calls(16).values()))
    mark()
    inputs = {case.name: Inputs(case, cold=False) for case in chosen}
    pairs = [
        (case, name)
        for name in job["implementations"]
        for case in chosen
        if name != "flash_sm80" or case in cases.generic_counter_cases()
    ]
    variants = {}
    for case, name in pairs:
        try:
            variants[case.name, name] = peers.variants(name, inputs[case.name])
        except Exception as error:
            log(case=case.name, implementation=name, reason=failure_reason(error))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for named in variants.values():
            for call in named.values():
                pool.submit(call.compile)  # what fails here fails again, and is told, below
    for case, name in pairs:
        if (case.name, name) not in variants:
            continue
        if time.time() > job["until"]:
            log(case=case.name, implementation=name, reason="not measured: no time left")
            continue
        try:
            call = _fastest(variants[case.name, name])
        except Exception as error:
            log(case=case.name, implementation=name, reason=failure_reason(error))
            continue
        log(case=case.name, implementation=name, begun=True)
        floor.driver.cuProfilerStart()
        mark()
        call()
        floor.driver.cuProfilerStop()


def _fastest(variants: dict):
    """A warm call, by the clock of the host: CUPTI's records are ncu's here."""

    def seconds(call):
        call()
        if len(variants) == 1:
            return 0.0
        start = time.perf_counter()
        for copy in range(TIMED_CALLS):
            call(copy)
        return time.perf_counter() - start

    usable, failure = {}, None
    for name, call in variants.items():
        try:
            usable[name] = seconds(call)
        except Exception as error:
            failure = error
    if not usable:
        raise failure
    return variants[min(usable, key=usable.get)]


def _log(path: str, **what):
    with open(path, "a") as file:
        file.write(json.dumps(what) + "\n")


# The process that the user started ----------------------------------------------------------------


def group_cases(group: str) -> list[cases.Case]:
    return [case for case in cases.counter_cases() if cases.counter_group(case) == group]


def measure(ncu: str, metrics: dict, job: dict, stop: float) -> tuple[list[dict], list[str], dict]:
    """The rows of one group, what ncu complained of, and what is known of the device."""
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        table, log, file = (folder / name for name in ("table.csv", "log.jsonl", "job.json"))
        log.touch()
        file.write_text(json.dumps(job | {"log": str(log)}))
        command = profile_command(ncu, metrics, job["group"], table)
        command += [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", str(file)]
        # Replayed graphs would hide their kernels from ncu.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
        variables = {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        ended = _run(command, os.environ | variables, stop)
        text = table.read_text(errors="replace") if table.exists() else ""
        said = [json.loads(line) for line in log.read_text().splitlines()]
    kernels, complaints = read_table(text)
    if not kernels:
        complaints += text.splitlines()[-2:]
    if ended:
        complaints.append(f"{job['group']}: {ended}")
    meta = next((line["meta"] for line in said if "meta" in line), {})
    return _rows_of(job, said, by_call(kernels), metrics), complaints, meta


def _run(command: list[str], variables: dict, stop: float) -> str | None:
    """Why it ended badly, or None."""
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = process.communicate(timeout=max(1, stop - time.time()))
    except subprocess.TimeoutExpired:
        return "stopped: no time left"
    finally:  # when this program is stopped, too: ncu and what it watches would go on
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or [""])[-1][:200]
        return f"ended with {process.returncode}: {last}"
    return None


def _rows_of(job: dict, said: list[dict], calls: list[list[dict]], metrics: dict) -> list[dict]:
    described = {case.name: case.describe() for case in group_cases(job["group"])}
    rows, begun = [], 0
    for line in said:
        if "case" not in line:
            continue
        row = described[line["case"]] | {"impl": line["implementation"]}
        if not line.get("begun"):
            rows.append(row | {"us": None, "reason": line["reason"]})
            continue
        kernels = calls[begun] if begun < len(calls) else []
        begun += 1
        rows += [row | kernel for kernel in kernel_rows(kernels, metrics)] or [
            row | {"us": None, "reason": "ncu saw no kernel of it"}
        ]
    return rows


def main():
    options = parse()
    if options.child:
        return child(json.loads(options.child.read_text()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    ncu, end = find_ncu(), time.time() + options.seconds
    query = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=60)
    metrics, missing = choose_metrics(query.stdout)
    if "ns" not in metrics:
        sys.exit(
            f"ncu --query-metrics tells of no durations: {(query.stdout + query.stderr)[-300:]}"
        )
    if missing:
        print(f"this ncu has nothing for {', '.join(missing)}")
    results = Results("counters")
    results.meta |= {"metrics": metrics, "metrics_missing": missing, "complaints": []}
    implementations = ["flash", "flash_sm80", *names.select(options.peers)]
    groups = {}
    for case in cases.counter_cases():
        if not options.case or any(part in case.name for part in options.case):
            groups.setdefault(cases.counter_group(case), []).append(case.name)
    while groups:
        group, chosen = next(iter(groups.items()))
        part = len(chosen) / sum(map(len, groups.values()))
        until = time.time() + max(0, end - time.time()) * part
        job = {"group": group, "cases": chosen, "implementations": implementations, "until": until}
        rows, complaints, meta = measure(ncu, metrics, job, until + GRACE_SECONDS)
        del groups[group]
        results.meta["complaints"] += complaints
        if meta:
            results.meta |= meta | {"commit": options.commit or meta["commit"]}
            directory = options.out or DIRECTORY / environment.slug(meta["device"])
            results.path = directory / "counters.json"
        for row in rows:
            results.add(row)
        results.write()
        seen = sum(bool(row["us"]) for row in rows)
        print(f"{group}: {seen} kernels, {len(rows) - seen} gaps; {'; '.join(complaints[:3])}")
    print("done", results.path or "without any result")
    if not any(row["us"] for row in results.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
