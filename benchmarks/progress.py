"""A progress bar by rich or tqdm where one of them is installed, lines of text otherwise."""

from __future__ import annotations

import sys
import time


def progress(total: int):
    """An object with `say(line)`, `doing(text)`, `advance()` and `close()`."""
    if sys.stderr.isatty():
        for make in (_RichProgress, _TqdmProgress):
            try:
                return make(total)
            except ImportError:
                continue
    return _PlainProgress(total)


class _RichProgress:
    def __init__(self, total):
        from rich import progress

        columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
        self._bar = progress.Progress(*columns)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def say(self, line):
        self._bar.console.print(line, highlight=False, markup=False)

    def doing(self, text):
        self._bar.update(self._task, description=text)

    def advance(self):
        self._bar.advance(self._task)

    def close(self):
        self._bar.stop()


class _TqdmProgress:
    def __init__(self, total):
        import tqdm

        self._bar = tqdm.tqdm(total=total, unit="case")

    def say(self, line):
        self._bar.write(line)

    def doing(self, text):
        self._bar.set_description(text)

    def advance(self):
        self._bar.update()

    def close(self):
        self._bar.close()


class _PlainProgress:
    def __init__(self, total):
        self._total, self._done, self._start = total, 0, time.monotonic()

    def say(self, line):
        seconds = time.monotonic() - self._start
        print(f"[{self._done}/{self._total} {seconds:5.0f} s] {line}", flush=True)

    def doing(self, text):
        pass

    def advance(self):
        self._done += 1

    def close(self):
        pass
