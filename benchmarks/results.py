"""The file of results, written anew after every row: an interrupted run keeps what it did."""

from __future__ import annotations

import json
import os
import pathlib

DIRECTORY = pathlib.Path(__file__).resolve().parent / "results"


class Results:
    def __init__(self, benchmark: str):
        self.benchmark = benchmark
        self.meta: dict = {"benchmark": benchmark}
        self.path: pathlib.Path | None = None
        self._rows: dict[tuple, dict] = {}

    def add(self, row: dict):
        """A later row of the same case and implementation (of counters: and kernel) takes the place of
        the earlier one."""
        self._rows[row["case"], row["operation"], row["impl"], row.get("kernel")] = row
        self.write()

    @property
    def rows(self) -> list[dict]:
        return list(self._rows.values())

    def rows_of(self, case: str) -> list[dict]:
        return [row for (name, *_), row in self._rows.items() if name == case]

    def write(self):
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join("  " + json.dumps(row) for row in self.rows)
        meta = json.dumps(self.meta, indent=1)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(f'{{"meta": {meta},\n"rows": [\n{rows}\n]}}\n')
        os.replace(unfinished, self.path)


def load(directory: pathlib.Path) -> dict[str, dict]:
    """{benchmark: {"meta": ..., "rows": [...]}} of one device."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
