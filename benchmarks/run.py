"""Measures attention on the device at hand, ours beside every peer, in one process.

    python benchmarks/run.py BENCHMARK [options]

BENCHMARK: prefill, distributions, backward, decode, decode_variants, decode_features, decode_steps,
features, naive, numerics, cpu or cpu_numerics.
Every result is checked against float64 before it is timed. A complete run goes to
benchmarks/results/<device>/<benchmark>.json, from which report.py makes tables and plots; a part of
one (--case, --peers, --smoke) to build/benchmarks/<device>/. Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

import cases
import environment
import names
import supervise
import worker
from progress import progress
from results import DIRECTORY, Results

import cpu

PARTIAL = DIRECTORY.parent.parent / "build" / "benchmarks"
GRACE_SECONDS = 45  # for the case that is running when the time is over


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmark", choices=cases.CASES)
    parser.add_argument(
        "--peers",
        default="default",
        help=f"comma-separated, of {', '.join(names.PEERS)}; 'all', or 'none' for ours alone "
        f"(by default all but {', '.join(names.ON_REQUEST)})",
    )
    parser.add_argument("--case", action="append", metavar="SUBSTRING", help="may be repeated")
    parser.add_argument(
        "--qk",
        metavar="FILE",
        help="of distributions: measure the q and k that examples/train.py dumped, to "
        "distributions_qk.json",
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each (15)")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="LIMIT")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds of silence until it counts as hung"
    )
    parser.add_argument("--commit", help="what was built, where git cannot say it")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the harness")
    return parser.parse_args(arguments)


def make_job(options: argparse.Namespace) -> worker.Job:
    if options.qk and options.benchmark != "distributions":
        sys.exit("--qk goes with distributions")
    make = cases.CASES[options.benchmark]
    chosen = cases.smoke_cases(options.benchmark) if options.smoke else make()
    if options.qk:
        chosen = cases.cases_of_file(options.qk)
    if options.case:
        chosen = [case for case in chosen if any(part in case.name for part in options.case)]
    if not chosen:
        sys.exit(f"no case of {options.benchmark} contains {' or '.join(options.case)}")
    on_cpu = options.benchmark.startswith("cpu")
    peers = names.select("xla" if on_cpu and options.peers == "default" else options.peers)
    return worker.Job(
        benchmark=options.benchmark,
        cases=chosen,
        implementations=["flash", *peers],
        rounds=options.rounds,
        deadline=time.time() + options.seconds,
        ceilings=not on_cpu and options.benchmark != "numerics",
    )


def out_directory(options: argparse.Namespace, device: str) -> pathlib.Path:
    if options.out:
        return options.out
    partial = options.case or options.smoke or options.peers not in ("default", "all")
    return (PARTIAL if partial else DIRECTORY) / environment.slug(device)


class Recorder:
    """Takes the events of a run into the file of results and onto the screen."""

    def __init__(self, options: argparse.Namespace, job: worker.Job, sampler):
        self.results = Results(options.benchmark + ("_qk" if options.qk else ""))
        self._options, self._sampler = options, sampler
        self._bar = progress(len(job.cases))

    def take(self, event: dict):
        kind = event["event"]
        if kind == "meta":
            self._take_meta(event["meta"])
        elif kind == "step":
            self._bar.doing(f"{event['case']}: {event['implementation']}")
        elif kind == "timing":
            self._sampler.start()
        elif kind == "row":
            self.results.add(event["row"] | self._clocks(event["row"]))
        elif kind == "case done":
            self._bar.advance()
            self._bar.say(summary(event["case"], self.results.rows_of(event["case"])))

    def _take_meta(self, meta: dict):
        self.results.meta |= meta
        if "device" in meta:
            self.results.meta["commit"] = self._options.commit or meta["commit"]
            directory = out_directory(self._options, meta["device"])
            self.results.path = directory / f"{self.results.benchmark}.json"
        self.results.write()

    def _clocks(self, row: dict) -> dict:
        """All rows of a case were timed together: the first of them ends the sampling."""
        if row.get("us") is None:
            return {}
        if clocks := self._sampler.stop():
            self._case_clocks = row["case"], clocks
        case, clocks = getattr(self, "_case_clocks", (None, {}))
        return clocks if case == row["case"] else {}

    def close(self, note: str | None = None):
        self._bar.close()
        if note:
            self.results.meta["note"] = note
            self.results.write()
        print(note or "done", self.results.path or "", flush=True)


def summary(case: str, rows: list[dict]) -> str:
    timed = sorted((row for row in rows if row.get("us")), key=lambda row: row["us"])
    checked = [row for row in rows if "max_error" in row and not row.get("us")]
    parts = []
    for row in timed:
        rate = f" {row['tflops']:.0f} TF/s" if row.get("tflops", 0) >= 10 else ""
        wrong = "" if row.get("within_bound", True) else " ERROR TOO LARGE"
        parts.append(f"{row['impl']} {row['us']:.1f} us{rate}{wrong}")
    parts += [f"{row['impl']} error {row['max_error']:.2e}" for row in checked]
    parts += [f"{row['impl']} - ({row['reason'][:70]})" for row in rows if row.get("reason")]
    return f"{case}: " + "; ".join(parts)


def main():
    options = parse()
    if options.benchmark.startswith("cpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    job = make_job(options)
    sampler = environment.GpuSampler()
    recorder = Recorder(options, job, sampler)
    if options.benchmark == "cpu":
        events = cpu.events(job)
    else:
        stop = job.deadline + GRACE_SECONDS
        events = supervise.supervise(job, options.patience, stop, idle=sampler.sample)
    try:
        for event in events:
            recorder.take(event)
    except KeyboardInterrupt:
        events.close()
        recorder.close("interrupted: incomplete")
        sys.exit(130)
    recorder.close("out of time: incomplete" if job.cases else None)


if __name__ == "__main__":
    main()
