"""The harness of benchmarks/: that it tells right from wrong, and says what is missing."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    """benchmarks/ is a directory of programs: its modules import each other by bare names, which
    are taken away again after the test."""
    before = set(sys.modules)
    hidden = {name: sys.modules.pop(name) for name in ("cases", "truth") if name in sys.modules}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
    sys.modules.update(hidden)


def run(*arguments, cwd=None):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_cases_are_those_of_the_tables(harness):
    cases = harness("cases")
    counts = {name: len(make()) for name, make in cases.CASES.items()}
    assert (counts["prefill"], counts["backward"], counts["decode"]) == (28, 12, 11)
    for make in cases.CASES.values():
        names = [(case.name, case.benchmark) for case in make()]
        assert len(set(names)) == len(names)


def test_truth_finds_a_wrong_result(harness):
    case = harness("cases").smoke_cases("prefill")[0]
    inputs = harness("inputs").Inputs(case, cold=False)
    truth = harness("truth").Truth(inputs)
    out = harness("peers").variants("flash", inputs)[""]()
    assert truth.error(out) <= truth.bound
    with pytest.raises(ArithmeticError):
        truth.error(out.at[0, :, 0].multiply(1.1))
    with pytest.raises(ArithmeticError):
        truth.error(out.at[-1, -1, -1, 0].set(np.nan))


def test_kernels_go_to_the_call_that_launched_them(harness):
    attribute = harness("timing")._attribute
    kernels = {"a": ("x", "y"), "b": ("z",)}
    records = [("sweep", 9.0), ("y", 1.0), ("x", 2.0), ("sweep", 9.0), ("z", 4.0)]
    assert attribute(records, ["a", "b"], kernels, skip=1) == [3.0, 4.0]
    assert attribute(records, ["b", "a"], kernels, skip=1) is None
    assert attribute([*records, ("w", 1.0)], ["a", "b"], kernels, skip=1) is None


def test_run_writes_rows_and_gaps(tmp_path):
    run_py = BENCHMARKS / "run.py"
    done = run(
        run_py, "prefill", "--smoke", "--rounds", 2, "--peers", "xla,cudnn", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "prefill.json").read_text())
    rows = {(row["case"], row["impl"]): row for row in result["rows"]}
    case = "bf16 B1 T128 N4 K2 H64 causal"
    assert rows[case, "flash"]["us"] > 0 and rows[case, "flash"]["within_bound"]
    assert rows[case, "xla"]["max_error"] > 0
    if result["meta"]["platform"] == "cpu":
        assert rows[case, "cudnn"]["us"] is None
        assert rows[case, "cudnn"]["reason"] == "needs a GPU"


def test_report_is_repeatable(harness, tmp_path):
    report, results = harness("report"), harness("results")
    file = results.Results("prefill")
    file.path = tmp_path / "some-gpu" / "prefill.json"
    file.meta |= {"device": "Some GPU", "platform": "gpu"}
    for case in harness("cases").prefill_cases():
        row = case.describe() | {"impl": "flash", "us": 10.0, "tflops": 1.0, "gbps": 1.0}
        file.add(row | {"max_error": 1e-3, "error_bound": 2e-3})
        file.add(row | {"impl": "cudnn", "us": 20.0})
        file.add(case.describe() | {"impl": "fa3", "us": None, "reason": "not today"})
    document = report.ROOT / "README.md"
    text = "before\n<!-- table: prefill -->\nold\n<!-- end -->\nafter\n"
    once = report.Report(tmp_path).rewrite(text, document)
    assert report.Report(tmp_path).rewrite(once, document) == once
    assert "geometric mean **2.000**" in once and "fa3: not today" in once and "old" not in once


def test_documents_agree_with_results():
    done = run(BENCHMARKS / "report.py", "--check")
    assert done.returncode == 0, done.stderr
