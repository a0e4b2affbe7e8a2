"""Writes the tables and figures of README.md and docs/ from benchmarks/results.

    python benchmarks/report.py [--check]

A document says where a table goes:

    <!-- table: prefill -->
    <!-- end -->

and where a figure goes: `figure` in place of `table`. What stands between the two lines is
replaced. --check writes nothing and fails if a document differs from what would be written; figures
are drawn anew without it and not compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import pathlib
import re
import sys

import plots
import tables
from results import DIRECTORY, load

ROOT = DIRECTORY.parent.parent
FIGURES = ROOT / "docs" / "figures"

# name: (file of results, or the pattern of several; what makes the lines)
TABLES = {
    "prefill": ("prefill", tables.throughput),
    "distributions": ("distributions", tables.throughput),
    "model data": ("distributions_qk", tables.throughput),
    "backward": ("backward", tables.throughput),
    "backward memory": ("backward", tables.memory),
    "decode": ("decode", tables.decode),
    "decode generic": ("decode_generic", tables.decode),
    "decode variants": ("decode_variants", tables.decode),
    "decode steps": ("decode_steps", tables.steps),
    "features": ("features", tables.features),
    "decode features": ("decode_features", tables.features),
    "training": ("training_*", tables.training),
    "numerics": ("numerics", tables.errors),
    "cpu numerics": ("cpu_numerics", tables.errors),
    "prefill errors": ("prefill", tables.errors),
    "backward errors": ("backward", tables.errors),
    "decode errors": ("decode", tables.errors),
    "naive": ("naive", tables.naive),
    "prefill roofline": ("prefill", tables.roofline),
    "backward roofline": ("backward", tables.roofline),
    "decode roofline": ("decode", tables.roofline),
    "counters": ("counters", tables.counters),
    "cpu": ("cpu", tables.cpu),
}
# Made from benchmarks/results/build.json.
BUILD_TABLES = {
    "build": tables.build,
    "kernels": tables.kernels,
    "decode plans": tables.decode_plans,
}
FIGURES_OF = {
    "prefill": ("prefill", plots.throughput),
    "decode": ("decode", plots.decode),
    "numerics": ("numerics", plots.errors),
    "training": ("training_*", plots.training),
}
# What makes the file of results, where it is not run.py.
PROGRAMS = {
    "counters": "python benchmarks/counters.py",
    "distributions_qk": "python benchmarks/run.py distributions --qk FILE",
    "training_*": "python examples/train.py --length T --json benchmarks/results/DEVICE/training_T.json",
}
SUMMARIES = ("prefill", "backward", "decode", "features")
MARKED = re.compile(
    r"(?P<open><!-- (?P<kind>table|figure): (?P<name>[\w ]+?) -->\n).*?(?P<close><!-- end -->)",
    re.DOTALL,
)


class Report:
    def __init__(self, results: pathlib.Path = DIRECTORY):
        directories = sorted(path for path in results.glob("*") if path.is_dir())
        self.devices = {path.name: load(path) for path in directories}
        self.build = load(results).get("build")
        for files in self.devices.values():
            for result in files.values():
                result["build"] = self.build

    def rewrite(self, text: str, document: pathlib.Path) -> str:
        """The document with everything between its markers made anew."""

        def fill(match: re.Match) -> str:
            make = self._table if match["kind"] == "table" else self._figure
            lines = make(match["name"], document)
            return match["open"] + "".join(f"{line}\n" for line in lines) + match["close"]

        return MARKED.sub(fill, text)

    def figures(self):
        """(function, result, path) of every figure that there are results for."""
        for benchmark, draw in FIGURES_OF.values():
            for device, file, result in self._results(benchmark):
                yield draw, result, _figure_path(file, device)

    def _results(self, benchmark: str) -> list[tuple[str, str, dict]]:
        """(device, file, result), GPUs before CPUs."""
        found = [
            (device, file, result)
            for device, files in self.devices.items()
            for file, result in files.items()
            if fnmatch.fnmatch(file, benchmark)
        ]
        # Files of one device by their names' numbers: training_4096 before training_16384.
        return sorted(
            found, key=lambda it: (it[2]["meta"].get("platform") != "gpu", it[0], len(it[1]), it[1])
        )

    def _table(self, name: str, document: pathlib.Path) -> list[str]:
        if name == "summary":
            return self._summary()
        if name in BUILD_TABLES:
            lines = BUILD_TABLES[name](self.build) if self.build else []
            return lines or [_missing("python benchmarks/build.py")]
        if name not in TABLES:
            raise SystemExit(f"{document}: there is no table {name!r}, only {', '.join(TABLES)}")
        benchmark, make = TABLES[name]
        lines = []
        for _, _, result in self._results(benchmark):
            lines += [tables.caption(result), "", *make(result), ""]
        if not lines and make is tables.naive:  # the bytes need no GPU
            lines = [*make({"rows": []}), ""]
        return lines or [_missing(_program(benchmark))]

    def _summary(self) -> list[str]:
        lines = []
        for device in self.devices:
            found = [self.devices[device].get(name) for name in SUMMARIES]
            rows = [row for result in found if result for row in tables.summary(result)]
            if rows:
                name = next(result for result in found if result)["meta"]["device"]
                lines += [f"{name}:", "", *tables.SUMMARY_HEAD, *rows, ""]
        return lines or [_missing(_program("prefill"))]

    def _figure(self, name: str, document: pathlib.Path) -> list[str]:
        if name not in FIGURES_OF:
            raise SystemExit(f"{document}: there is no figure {name!r}")
        benchmark = FIGURES_OF[name][0]
        lines = []
        for device, file, result in self._results(benchmark):
            path = os.path.relpath(_figure_path(file, device), document.parent)
            lines.append(f"![{name} on {result['meta']['device']}]({path})")
        return lines or [_missing(_program(benchmark))]


def _figure_path(file: str, device: str) -> pathlib.Path:
    return FIGURES / f"{file.replace('_', '-')}-{device}.svg"


def _program(benchmark: str) -> str:
    return PROGRAMS.get(benchmark, f"python benchmarks/run.py {benchmark}")


def _missing(command: str) -> str:
    return f"No results yet: `{command}`, then this report again."


def documents() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    report, different = Report(), []
    for document in documents():
        if not document.exists():
            continue
        text = document.read_text()
        if (new := report.rewrite(text, document)) != text:
            different.append(document.relative_to(ROOT))
            if not check:
                document.write_text(new)
    if check:
        if different:
            sys.exit(f"differ from benchmarks/results: {', '.join(map(str, different))}")
        return
    drawn = 0
    for draw, result, path in report.figures():
        draw(result, path)
        drawn += 1
    print(f"{len(different)} documents changed, {drawn} figures drawn")


if __name__ == "__main__":
    main()
