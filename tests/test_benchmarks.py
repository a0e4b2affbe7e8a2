"""The harness of benchmarks/: that it tells right from wrong, and says what is missing."""

import collections
import functools
import json
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    """benchmarks/ is a directory of programs: its modules import each other by bare names, which
    are taken away again after the test."""
    before = set(sys.modules)
    hidden = {
        name: sys.modules.pop(name) for name in ("cases", "truth", "build") if name in sys.modules
    }
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


def test_truth_leaves_out_what_lies_behind_the_lengths(harness):
    case = next(c for c in harness("cases").smoke_cases("features") if c.feature("lengths"))
    inputs = harness("inputs").Inputs(case, cold=False)
    truth = harness("truth").Truth(inputs)
    out = harness("peers").variants("flash", inputs)[""]()
    length = case.lengths[0]
    assert length < case.T
    assert truth.error(out.at[0, length:].set(np.nan)) <= truth.bound
    with pytest.raises(ArithmeticError):
        truth.error(out.at[0, length - 1].set(np.nan))


def test_gradients_of_fa3_have_room_for_whole_blocks(harness):
    """Its kernel writes statistics for blocks of 80 rows: 2080 of them at length 2048."""
    query = jax.ShapeDtypeStruct((2, 2048, 16, 128), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 16, 2048), jnp.float32)
    options = {"softmax_scale": 0.1, "is_causal": False, "window_size": (-1, -1)}
    gradients = functools.partial(harness("peers")._fa3_gradients, **options)
    jaxpr = jax.make_jaxpr(gradients)(*[query] * 5, lse)
    (call,) = [e for e in jaxpr.eqns if e.primitive.name == "ffi_call"]
    assert [v.aval.shape for v in call.outvars] == [query.shape] * 3 + [(2, 16, 2080)] * 2
    assert jaxpr.out_avals == [v.aval for v in call.outvars[:3]]


def test_a_crash_while_compiling_loses_nobody(harness):
    supervise, worker = harness("supervise"), harness("worker")
    cases = harness("cases").smoke_cases("prefill")
    job = worker.Job("prefill", cases, ["flash", "xla"], rounds=1, deadline=0.0)
    process = types.SimpleNamespace(step=(cases[0].name, worker.COMPILATION), reason="crashed")
    assert not list(supervise._lose(job, process, collections.Counter()))
    assert job.cases == cases and (cases[0].name, worker.COMPILATION) in job.skip
    process.step = cases[0].name, "xla"
    (event,) = supervise._lose(job, process, collections.Counter())
    assert (event["row"]["impl"], event["row"]["reason"]) == ("xla", "crashed")


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


def test_steps_of_several_layers_and_training_are_reported(harness, tmp_path):
    done = run(
        *(BENCHMARKS / "run.py", "decode_steps", "--smoke", "--rounds", 2),
        *("--peers", "xla", "--out", tmp_path / "some-device"),
    )
    assert done.returncode == 0, done.stderr
    runs = {
        name: {"tokens_per_second": rate, "temporary_bytes": 1 << 30, "losses": [3.0, 2.0, 1.5]}
        | {"distance": 0.0}
        for name, rate in (("flash", 2000.0), ("cudnn", 1000.0))
    }
    settings = {"length": 4096, "batch": 4, "layers": 8, "heads": 16, "head_dim": 64, "steps": 3}
    training = {"settings": settings, "reference": "cudnn", "allowed": 1e-3, "runs": runs}
    training |= {"meta": {"device": "Some GPU", "platform": "gpu"}, "twin": runs["cudnn"]}
    for length in (16384, 4096):
        path = tmp_path / "some-device" / f"training_{length}.json"
        path.write_text(json.dumps(training | {"settings": settings | {"length": length}}))
    report = harness("report")
    names = ("table: decode steps", "table: training", "figure: training")
    text = "".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names)
    report = report.Report(tmp_path)
    text = report.rewrite(text, harness("report").ROOT / "docs" / "x.md")
    assert "| bf16 B2 S256 N8 K2 H64 layers=3 |" in text
    assert "| flash | 2,000 | 1.00 | 1.5000 | 0.0e+00 |" in text
    assert text.index("T 4096") < text.index("T 16384")
    assert "(figures/training-4096-some-device.svg)" in text
    pytest.importorskip("matplotlib")
    for draw, result, path in report.figures():
        draw(result, tmp_path / path.name)
    assert "<svg" in (tmp_path / "training-16384-some-device.svg").read_text()


USAGE = """
arch = sm_80
 Function _ZN1aE:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:880 TEXTURE:0
arch = sm_90a
 Function _ZN1aE:
  REG:168 STACK:8 SHARED:2048 LOCAL:0 CONSTANT[0]:880 TEXTURE:0
 Function _ZN1aE:
  REG:168 STACK:8 SHARED:2048 LOCAL:0 CONSTANT[0]:880 TEXTURE:0
"""
LAUNCHED = """call 128 prefill, causal
kernel -32 384 197632 1 prefill_sm90
tile 128 1 2048 128 128
plan 1,1024,32,8,128 8 8 0 1 splits merge inside a cluster
"""
SYMBOLS = "0000000000001020 t _ZN9flashattnL1kE\n0000000000001040 T main\n"


def test_resources_of_a_build_are_read(harness):
    build = harness("build")
    old, new = build.parse_resources(USAGE)
    assert (old["architecture"], old["registers"], old["local"]) == ("sm_80", 40, 0)
    assert (new["architecture"], new["shared"], new["local"]) == ("sm_90a", 2048, 8)
    said = build.parse_launches(LAUNCHED, SYMBOLS)
    (launch,) = build.with_resources(
        said["launches"], [new | {"symbol": "_ZN9flashattn1kE", "shared": 2048}]
    )
    assert (launch["call"], launch["kernel"]) == ("prefill, causal", "prefill_sm90")
    assert (launch["shared"], launch["blocks_per_sm"]) == (197632 + 2048, 1)
    assert said["prefill_tiles"][0]["keys"] == 128
    assert said["decode_plans"][0]["reason"] == "splits merge inside a cluster"
    with pytest.raises(SystemExit, match="too small"):
        build.parse_launches("call 64 backward\nrefused workspace is too small\n", SYMBOLS)


def test_launchers_of_this_build_say_what_they_launch(harness, tmp_path):
    build = harness("build")
    trees = [path.parents[2] for path in build.ROOT.glob("build/*/CMakeFiles/_cuda.dir/src")]
    if not trees:
        pytest.skip("no build with CUDA kernels here")
    try:
        build.tool("nvcc")
    except SystemExit:
        pytest.skip("no nvcc here")
    said = build.launches(max(trees, key=lambda tree: tree.stat().st_mtime), tmp_path)
    kernels = {launch["kernel"] for launch in said["launches"]}
    assert {"prefill_sm90", "prefill_sm80", "backward_keys_sm90", "decode_lean"} <= kernels
    assert all(0 < launch["threads"] <= 1024 for launch in said["launches"])
    assert all(launch["dynamic_shared"] <= 227 << 10 for launch in said["launches"])
    assert len(said["decode_plans"]) == len(build.DECODE_SHAPES)


@pytest.mark.parametrize(
    "registers, threads, shared, blocks",
    [
        (168, 384, 70000, 1),  # registers
        (92, 256, 70912, 2),  # registers, given out by 8
        (168, 128, 42368, 3),  # registers
        (32, 256, 78000, 2),  # shared memory
        (32, 256, 1024, 8),  # threads
        (16, 32, 1024, 32),  # blocks
    ],
)
def test_blocks_per_sm(harness, registers, threads, shared, blocks):
    assert harness("build").blocks_per_sm(registers, threads, shared) == blocks


KNOWN_METRICS = """Device NVIDIA H200 (GH100)
------------------------------ ----------- ------- ----------------
Metric Name                    Metric Type Unit    Metric Description
dram__bytes                    Counter     byte    # of bytes
gpu__time_duration             Counter     ns      duration
lts__throughput                Throughput  %       L2
sm__cycles_elapsed             Counter     cycle   # of cycles
sm__inst_executed_pipe_xu      Counter     inst    # of instructions
sm__pipe_tensor_cycles_active  Counter     cycle   # of cycles
smsp__average_warps_issue_stalled_gmma_per_issue_active Ratio warp x
smsp__average_warps_issue_stalled_wait_per_issue_active Ratio warp x
"""
# Stands in for Nsight Compute: takes the place of the process that it would watch, and profiles one
# call of ours with two kernels and one of a peer.
FAKE_NCU = """#!{python}
import json, pathlib, sys
if "--query-metrics" in sys.argv:
    sys.exit(print({known!r}))
after = dict(zip(sys.argv, sys.argv[1:]))
job = json.loads(pathlib.Path(after["--child"]).read_text())
assert "--clock-control none" in " ".join(sys.argv)
assert after["--cache-control"] == ("all" if job["group"] == "decode" else "none")
meta = {{"device": "Some GPU", "platform": "gpu", "commit": None}}
said = [{{"meta": meta}}]
said.append({{"case": job["cases"][0], "implementation": "fa3", "reason": "not today"}})
for name in ("flash", "cudnn"):
    said.append({{"case": job["cases"][0], "implementation": name, "begun": True}})
pathlib.Path(job["log"]).write_text("".join(json.dumps(line) + chr(10) for line in said))
metrics = after["--metrics"].split(",")
rows = [["ID", "Kernel Name", "Block Size", "Grid Size", *metrics]]
rows.append(["", "", "", "", *["%"] * len(metrics)])

def kernel(name, ns):
    values = {{"gpu__time_duration.sum": ns, "sm__cycles_elapsed.max": "1,980,000"}}
    values["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"] = "71.25"
    values["smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"] = "3.5"
    values["launch__registers_per_thread"] = "168"
    cells = [values.get(metric, "n/a") for metric in metrics]
    rows.append([str(len(rows)), name, "(384, 1, 1)", "(132, 1, 1)", *cells])

kernel("stream_read", "1,000")
kernel("loop_broadcast_fusion", "10,000")
kernel("void flashattn::prefill_sm90_kernel<__nv_bfloat16, flashattn::PrefillTile<9>>(int)", "990,000")
kernel("stream_read", "1,000")
kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_kernel0_0", "9")
lines = [",".join(chr(34) + cell + chr(34) for cell in row) for row in rows]
text = ["==PROF== Connected to process 1", "==WARNING== something", *lines]
pathlib.Path(after["--log-file"]).write_text(chr(10).join(text))
"""


def test_counters_of_ncu_become_rows_and_a_table(harness, tmp_path, monkeypatch):
    ncu = tmp_path / "ncu"
    ncu.write_text(FAKE_NCU.format(python=sys.executable, known=KNOWN_METRICS))
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    case = "bf16 B1 T16384 N16 K16 H128 full"
    out = tmp_path / "results" / "some-gpu"
    done = run(BENCHMARKS / "counters.py", "--case", case, "--case", "B1 S8192", "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "counters.json").read_text())
    assert "fma" in result["meta"]["metrics_missing"]
    assert result["meta"]["metrics"]["l2"].startswith("lts__throughput")  # the second choice
    assert "==WARNING== something" in result["meta"]["complaints"]
    rows = [row for row in result["rows"] if row["case"] == case]
    by_kernel = {(row["impl"], row.get("kernel")): row for row in rows}
    ours = by_kernel["flash", "prefill_sm90"]
    assert (ours["us"], ours["share"], ours["sm_mhz"], ours["tensor"]) == (990, 0.99, 2000, 71.25)
    assert (ours["registers"], ours["xu"], ours["stalls"]) == (168, None, {"gmma": 3.5})
    assert by_kernel["flash", "loop_broadcast_fusion"]["share"] == 0.01
    assert by_kernel["cudnn", "cudnn_sdpa_sm90_flash_fprop"]["us"] == 0.009
    assert by_kernel["fa3", None]["reason"] == "not today"
    report = harness("report")
    text = "<!-- table: counters -->\n<!-- end -->\n"
    text = report.Report(tmp_path / "results").rewrite(text, report.ROOT / "README.md")
    assert f"| {case} | flash | prefill_sm90 | 990.0 | 2000 | **71** | - |" in text
    assert "loop_broadcast_fusion" not in text and "fa3, " + case + ": not today" in text
    assert (
        "Ours, prefill: matrix units busiest in the longest kernel of 1 shape, 71 to 71 %." in text
    )


def test_what_needs_no_gpu_is_reported_without_one(harness, tmp_path):
    report = harness("report").Report(tmp_path)
    text = "<!-- table: naive -->\n<!-- end -->\n<!-- table: build -->\n<!-- end -->\n"
    text = report.rewrite(text, harness("report").ROOT / "README.md")
    assert "| 8192 | 3,072.0 MiB | 48.0 MiB | - | - | - |" in text
    assert "build.py" in text


def test_documents_agree_with_results():
    done = run(BENCHMARKS / "report.py", "--check")
    assert done.returncode == 0, done.stderr
