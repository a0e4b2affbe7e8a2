"""Runs worker.py in a process of its own and lives through its death.

When the process ends before its work or stays silent for too long, what it was doing becomes a gap
of the table, and a new process goes on with the rest.
"""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Callable, Iterator

import worker

ATTEMPTS = 4  # at one case, each after the loss of one implementation
POLL_SECONDS = 0.05


class Worker:
    """One process, its events, and what it was last heard to do."""

    def __init__(self, job: worker.Job):
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe(duplex=False)
        self._process = context.Process(target=worker.run, args=(job, child), daemon=True)
        self._process.start()
        child.close()
        self.step: tuple[str, str] | None = None  # (case, implementation)
        self.reason: str | None = None  # of its end; None if it was done

    def events(self, patience: float, deadline: float, idle: Callable) -> Iterator[dict]:
        heard = time.time()
        while True:
            idle()
            now = time.time()
            if now > deadline or now > heard + patience:
                self.reason = "stopped: no time left"
                if now <= deadline:
                    self.reason = f"no answer for {patience:.0f} s"
                return self.stop()
            if not self._pipe.poll(POLL_SECONDS):
                continue
            try:
                event = self._pipe.recv()
            except EOFError:
                self._process.join()
                self.reason = self.reason or f"crashed (exit code {self._process.exitcode})"
                return None
            heard = time.time()
            if event["event"] == "done":
                self.reason = None
                return self._process.join()
            if event["event"] == "step":
                self.step = event["case"], event["implementation"]
            elif event["event"] == "fatal":
                self.reason = event["reason"]
            yield event

    def stop(self):
        self._process.kill()
        self._process.join()


def supervise(
    job: worker.Job, patience: float, deadline: float, idle: Callable = lambda: None
) -> Iterator[dict]:
    """The events of a job. `idle` is called often, whatever the worker does. At the deadline the
    worker is stopped; the job's own, after which it begins no case, should come earlier."""
    attempts = collections.Counter()
    while job.cases and time.time() < job.deadline:
        process = Worker(job)
        try:
            for event in process.events(patience, deadline, idle):
                if "ceilings" in event.get("meta", {}):
                    job.ceilings = False
                if event["event"] == "case done":
                    job.cases = [case for case in job.cases if case.name != event["case"]]
                yield event
        finally:
            process.stop()
        if process.reason is None:
            return
        if process.step is None:
            raise RuntimeError(f"the measuring process did not start: {process.reason}")
        yield from _lose(job, process, attempts)


def _lose(job: worker.Job, process: Worker, attempts) -> Iterator[dict]:
    """Takes what the process died of out of the job, and says so."""
    name, implementation = process.step
    if name == "ceilings":
        job.ceilings = False
        yield {"event": "meta", "meta": {"ceilings": {}, "ceilings_reason": process.reason}}
        return
    attempts[name] += 1
    repeated = (name, implementation) in job.skip
    job.skip[name, implementation] = process.reason
    if implementation == worker.COMPILATION:  # the next attempt, one by one, shows whose it was
        return
    case = next((case for case in job.cases if case.name == name), None)
    if case is None:
        return
    lost = [implementation]
    if repeated or implementation == "inputs" or attempts[name] == ATTEMPTS:
        job.cases = [other for other in job.cases if other is not case]
        lost = [*job.implementations, "floor"]
    for implementation in lost:
        reason = job.skip.get((name, implementation), process.reason)
        yield {"event": "row", "row": worker.gap(case, implementation, reason)}
    if case not in job.cases:
        yield {"event": "case done", "case": name}
