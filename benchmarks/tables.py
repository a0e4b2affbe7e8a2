"""Results as Markdown. Every function takes one file of results and returns lines of text."""

from __future__ import annotations

import math

from cases import naive_cases
from names import OWN_VARIANTS, PEERS, UNITS

OURS = "flash"
EXPONENTIALS_PER_CLOCK = 16  # of one multiprocessor
SHARED_BYTES_PER_CLOCK = 128
SHOWN_SHARE = 0.05  # of the time of a call that a kernel takes to have a line of its own


def caption(result: dict) -> str:
    meta, rows = result["meta"], result.get("rows", [])
    parts = [meta.get("device", "?")]
    for name in ("driver", "cuda", "jax"):
        if meta.get(name):
            parts.append(f"{'CUDA' if name == 'cuda' else name} {meta[name]}")
    commit = f", commit {meta['commit']}" if meta.get("commit") else ""
    parts.append(f"{meta.get('date')}{commit}")
    text = f"{'; '.join(parts)}."
    if meta.get("timer") and any(row.get("us") for row in rows):
        spread = max(row.get("spread", 0) for row in rows)
        apart = f"; the quartiles of a row lie at most {100 * spread:.0f} % apart" if spread else ""
        text += f" Medians, {meta['timer']}{apart}."
    if ceilings := meta.get("ceilings"):
        text += (
            f" Ceilings of the same run: 8192 matrix product {ceilings['matmul_bf16_tflops']:.0f} "
            f"TFLOP/s (bf16), reading {ceilings['read_tbps']:.2f} TB/s, a kernel that reads "
            f"nothing {ceilings['launch_us']:.1f} us."
        )
    return text + (f" **{meta['note'].capitalize()}.**" if meta.get("note") else "")


def throughput(result: dict) -> list[str]:
    """TFLOP/s of everybody, and ours over the best peer's."""
    return _comparison(result, "tflops", lambda row: f"{row['tflops']:.0f}")


def decode(result: dict) -> list[str]:
    """Microseconds and GB/s of the cache, with the floor."""
    return _comparison(
        result,
        "us",
        lambda row: f"{row['us']:.1f} ({row['gbps']:.0f})",
        extra=("floor", "ours / floor"),
        extra_cells=_floor_cells,
    )


def features(result: dict) -> list[str]:
    return _comparison(
        result,
        "us",
        lambda row: f"{row['us']:.1f}",
        extra=("over plain",),
        extra_cells=lambda rows: [_over_plain(rows, result)],
    )


def steps(result: dict) -> list[str]:
    """The wall clock of the host beside the time of the kernels."""
    names = _present(result, [OURS, *PEERS])
    head = ["shape", *(f"{name}, {what}" for name in names for what in ("host us", "kernels us"))]
    head += ["launches of ours", "best peer / ours, host"]
    lines = [_line(head), _rule(len(head))]
    notes: dict[str, int] = {}
    for case, rows in _by_case(result).items():
        cells = [case]
        for name in names:
            row = rows.get(name, {"reason": "not measured"})
            if row.get("us"):
                cells += [f"{row['host_us']:.0f}", f"{row['us']:.0f}"]
            else:
                note = notes.setdefault(f"{name}: {row['reason']}", len(notes) + 1)
                cells += [f"-<sup>{note}</sup>"] * 2
        ours = rows.get(OURS, {})
        others = [row["host_us"] for name, row in rows.items() if _is_peer(name, row)]
        cells.append(str(sum(ours.get("kernels", {}).values()) or "-"))
        cells.append(f"{min(others) / ours['host_us']:.2f}" if others and ours.get("us") else "-")
        lines.append(_line(cells))
    return lines + _footnotes(notes)


def memory(result: dict) -> list[str]:
    """What a call allocates beside its operands, MiB."""
    known = [row for row in result["rows"] if row.get("memory_bytes")]
    if not known:
        return ["These results do not hold it: `run.py` records it since."]
    names = [n for n in (OURS, *PEERS) if any(row["impl"] == n for row in known)]
    lines = [_line(["shape", *names]), _rule(len(names) + 1)]
    for case, rows in _by_case(result).items():
        sizes = [rows.get(name, {}).get("memory_bytes") for name in names]
        lines.append(_line([case, *(f"{size / 2**20:.0f}" if size else "-" for size in sizes)]))
    return lines


def training(result: dict) -> list[str]:
    """What examples/train.py measured: speed, memory, and how far apart the loss curves are."""
    settings, runs, reference = result["settings"], result["runs"], result["reference"]
    head = ["attention", "tokens/s", "temporary, GiB", "last loss", f"distance from {reference}"]
    lines = [
        f"T {settings['length']}, batch {settings['batch']}, {settings['layers']} layers, "
        f"{settings['heads']} heads of {settings['head_dim']}, {settings['steps']} steps. Allowed "
        f"distance: {result['allowed']:.1e}.",
        "",
        _line(head),
        _rule(len(head)),
    ]
    for name, run in runs.items():
        cells = [f"{run['tokens_per_second']:,.0f}", f"{run['temporary_bytes'] / 2**30:.2f}"]
        last = run["losses"][-max(1, len(run["losses"]) // 16) :]
        cells += [f"{sum(last) / len(last):.4f}", f"{run['distance']:.1e}"]
        lines.append(_line([name, *cells]))
    return lines


def summary(result: dict) -> list[str]:
    """One row of the README's table: how far ahead of the best peer, over all rows."""
    ratios = _ratios(result)
    if not ratios:
        return []
    worst, best = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    mean = geometric_mean(ratios.values())
    cells = [result["meta"]["benchmark"], str(len(ratios)), f"**{mean:.2f}**"]
    return [_line([*cells, f"{ratios[worst]:.2f} ({worst})", f"{ratios[best]:.2f} ({best})"])]


SUMMARY_HEAD = [
    "| benchmark | shapes | speed over the best peer, geometric mean | least | most |",
    "|---|---|---|---|---|",
]


def errors(result: dict) -> list[str]:
    """The largest error against float64, and the bound that ours must keep."""
    names = _present(result, [OURS, *PEERS])
    lines = [_line(["shape", *names, "bound"]), _rule(len(names) + 2)]
    for case, rows in _by_case(result).items():
        cells = [_error(rows.get(name)) for name in names]
        if not rows.get(OURS, {}).get("within_bound", True):
            cells[0] += " (inexact)"
        lines.append(_line([case, *cells, _error(rows.get(OURS), "error_bound")]))
    return lines


def naive(result: dict) -> list[str]:
    """Beside the attention that writes its scores to memory."""
    head = ["T", "scores", "what ours reads and writes", "XLA, us", "ours, us", "XLA / ours"]
    lines = [_line(head), _rule(len(head))]
    measured = _by_case(result)
    for case in naive_cases():
        rows = measured.get(case.name, {})
        xla, ours = rows.get("xla", {}).get("us"), rows.get(OURS, {}).get("us")
        sizes = [f"{size / 2**20:,.1f} MiB" for size in (case.score_bytes, case.bytes)]
        cells = [f"{xla:.1f}" if xla else "-", f"{ours:.1f}" if ours else "-"]
        ratio = f"{xla / ours:.1f}" if xla and ours else "-"
        lines.append(_line([str(case.T), *sizes, *cells, ratio]))
    return lines


def roofline(result: dict) -> list[str]:
    """Measured against modelled: the least time that each unit needs for the work of the shape."""
    meta, ceilings = result["meta"], result["meta"].get("ceilings")
    if not ceilings or not meta.get("processors"):
        return []
    units = ("matrix units", "exponentials", "shared memory", "memory")
    head = ["shape", *(f"{unit}, us" for unit in units), "measured, us", "share"]
    lines = [_line(head), _rule(len(head))]
    for case, rows in _by_case(result).items():
        row = rows.get(OURS, {})
        if not row.get("us") or not row.get("tflops"):
            continue
        flops, size = row["tflops"] * row["us"] * 1e6, row["gbps"] * row["us"] * 1e3
        matrix = "fp16" if row["dtype"] == "float16" else "bf16"
        times = [flops / ceilings[f"matmul_{matrix}_tflops"] / 1e6]
        backward = row["operation"] == "backward"
        products = 7 if backward else 2  # of 2 H floating-point operations a score
        scores = flops / (2 * row["H"] * products)
        exponentials = scores * (2 if backward else 1)
        clock = row.get("sm_mhz") or 0
        clocks = meta["processors"] * clock
        times.append(exponentials / (EXPONENTIALS_PER_CLOCK * clocks) if clocks else None)
        shared = _shared_memory_bytes(row, scores, size, result.get("build"))
        times.append(shared / (SHARED_BYTES_PER_CLOCK * clocks) if clocks and shared else None)
        times.append(size / ceilings["read_tbps"] / 1e6)
        limit = max(time for time in times if time is not None)
        cells = ["-" if time is None else f"{time:.1f}" for time in (*times, row["us"])]
        lines.append(_line([case, *cells, f"{100 * limit / row['us']:.0f} %"]))
    return lines


def _shared_memory_bytes(row: dict, scores: float, size: float, build: dict | None):
    """What must pass between shared memory and the rest of the SM; None where there is no model.

    Decode: the cache, in and out. The Hopper forward: every 64 query rows read the K and the V of
    their tile and, for each tile, their Q; a tile of rows fills K and V in once.
    """
    if row["operation"] == "decode":
        return 2 * size
    tiles = build["prefill_tiles"] if build and row["operation"] == "prefill" else []
    for tile in tiles:
        if (tile["head_dim"], tile["causal"]) == (row["H"], row["causal"]):
            if row["T"] <= tile["max_q_len"]:
                return scores * 2 * row["H"] * (1 / 32 + 1 / tile["keys"] + 2 / tile["rows"])
    return None


def counters(result: dict) -> list[str]:
    """What ncu counted in each kernel, and which unit was busiest."""
    shown = [row for row in result["rows"] if row.get("us") and row["share"] >= SHOWN_SHARE]
    units = [unit for unit in UNITS if any(row.get(unit) is not None for row in shown)]
    head = ["shape", "whose", "kernel", "us", "MHz", *(f"{UNITS[unit]}, %" for unit in units)]
    head += ["memory, MB", "warps, %", "registers", "waits for"]
    lines = [_line(head), _rule(len(head))]
    for row in shown:
        busiest = _busiest(row)
        cells = [row["case"], row["impl"], row["kernel"], f"{row['us']:.1f}"]
        cells.append(_whole(row.get("sm_mhz")))
        for unit in units:
            cells.append(f"**{row[unit]:.0f}**" if unit == busiest else _whole(row.get(unit)))
        moved = [row.get(f"dram_{way}_bytes") for way in ("read", "write")]
        cells.append("-" if None in moved else f"{sum(moved) / 1e6:.0f}")
        cells += [_whole(row.get(name)) for name in ("warps", "registers")]
        cells.append(", ".join(f"{name} {value:.1f}" for name, value in row["stalls"].items()))
        lines.append(_line(cells))
    if sentences := _busiest_units(shown):
        lines += ["", " ".join(sentences)]
    gaps = {f"{r['impl']}, {r['case']}: {r['reason']}" for r in result["rows"] if not r.get("us")}
    if gaps:
        lines += ["", *(f"Gap: {gap}.<br>" for gap in sorted(gaps))]
    if missing := result["meta"].get("metrics_missing"):
        lines += ["", f"This ncu has nothing for: {', '.join(missing)}."]
    return lines


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _busiest(row: dict) -> str | None:
    measured = {unit: row[unit] for unit in UNITS if row.get(unit) is not None}
    return max(measured, key=measured.get, default=None)


def _busiest_units(rows: list[dict]) -> list[str]:
    """What the longest kernel of each call of ours is limited by, in words."""
    longest: dict[tuple, dict] = {}
    for row in rows:
        if row["impl"] == OURS:
            longest.setdefault((row["operation"], row["case"]), row)
    found: dict[tuple, list[float]] = {}
    for (operation, _), row in longest.items():
        if unit := _busiest(row):
            found.setdefault((operation, unit), []).append(row[unit])
    return [
        f"Ours, {operation}: {UNITS[unit]} busiest in the longest kernel of {len(busy)} "
        f"{'shape' if len(busy) == 1 else 'shapes'}, {min(busy):.0f} to {max(busy):.0f} %."
        for (operation, unit), busy in found.items()
    ]


def cpu(result: dict) -> list[str]:
    head = ["shape", "pass", "ours, ms", "jax.nn, ms", "jax.nn / ours"]
    head += ["ours, peak MiB", "jax.nn, peak MiB", "error / bound"]
    lines = [_line(head), _rule(len(head))]
    for (case, operation), rows in _by_case(result, "operation").items():
        ours, xla = rows.get(OURS, {}), rows.get("xla", {})
        cells = [f"{row['us'] / 1e3:.1f}" if row.get("us") else "-" for row in (ours, xla)]
        both = ours.get("us") and xla.get("us")
        cells.append(f"**{xla['us'] / ours['us']:.2f}**" if both else "-")
        cells += [f"{row['peak_mb']:.0f}" if row.get("us") else "-" for row in (ours, xla)]
        cells.append(f"{ours['max_error'] / ours['error_bound']:.2f}" if ours.get("us") else "-")
        lines.append(_line([case, operation, *cells]))
    return lines


# The build ----------------------------------------------------------------------------------------


def build(result: dict) -> list[str]:
    """The README's sentence on what a build costs."""
    meta = result["meta"]
    cost = meta["cost"]
    if not cost:
        return []
    others = "; ".join(
        f"{peer['package']} {peer['version']}: {peer['wheel_bytes'] / 1e6:.1f} MB"
        for peer in meta["peers"]
    )
    return [
        f"A clean build with CUDA {meta['cuda']} took {cost['processor_seconds'] / 60:.0f} minutes of "
        f"processor time, {cost['seconds'] / 60:.1f} minutes on {cost['cores']} cores",
        f"({cost['processor']}). The wheel is {cost['wheel_bytes'] / 1e6:.1f} MB ({others}).",
    ]


def kernels(result: dict) -> list[str]:
    """A line for each kernel of the calls, a column for each compiled head dim."""
    launches = [launch for launch in result["launches"] if launch["dynamic_shared"]]
    head_dims = sorted({launch["head_dim"] for launch in launches})
    lines: dict[tuple, dict] = {}
    shown = set()
    for launch in launches:
        key = launch["symbol"], launch["head_dim"]
        if key not in shown:
            shown.add(key)
            cells = lines.setdefault((launch["kernel"], launch["call"]), {})
            cells[launch["head_dim"]] = _kernel_cell(launch)
    table = [_line(["kernel", "call", *(f"H {n}" for n in head_dims)]), _rule(len(head_dims) + 2)]
    operations = ("prefill", "backward", "decode")
    for kernel, call in sorted(lines, key=lambda line: operations.index(line[1].split(",")[0])):
        cells = lines[kernel, call]
        table.append(_line([kernel, call, *(cells.get(n, "") for n in head_dims)]))
    compiled, local = result["kernels"], sum(k["local"] > 0 for k in result["kernels"])
    meta = result["meta"]
    return [
        f"CUDA {meta['cuda']}, commit {meta['commit']}: {len(compiled)} kernels, of which {local} keep "
        "anything in local memory (spills). A cell: registers a thread, shared memory of a block, "
        "blocks of threads an SM.",
        "",
        *table,
    ]


def _kernel_cell(launch: dict) -> str:
    size, blocks = launch["shared"] / 1024, launch["blocks_per_sm"]
    return f"{launch['registers']}, {size:.0f} KB, {blocks} x {launch['threads']}"


def decode_plans(result: dict) -> list[str]:
    lines = [_line(["shape", "kv heads", "splits", "blocks", "kernel", "because"]), _rule(6)]
    for plan in result["decode_plans"]:
        batch, length, heads, kv_heads, head_dim = plan["shape"]
        pairs = batch * kv_heads
        blocks = str(pairs * plan["splits"])
        blocks += f" + {plan['extra_blocks'] * kv_heads}" if plan["extra_blocks"] else ""
        shape = f"B{batch} S{length} N{heads} K{kv_heads} H{head_dim}"
        kernel = "lean" if plan["lean"] else "general"
        lines.append(
            _line([shape, str(pairs), str(plan["splits"]), blocks, kernel, plan["reason"]])
        )
    return lines


# Parts --------------------------------------------------------------------------------------------


def geometric_mean(values) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def _comparison(result, field, show, extra=(), extra_cells=lambda rows: []) -> list[str]:
    names = _present(result, [OURS, *PEERS])
    lines = [_line(["shape", *names, *extra, "ours / best peer"])]
    lines.append(_rule(len(names) + len(extra) + 2))
    notes: dict[str, int] = {}
    for case, rows in _by_case(result).items():
        best = min((row["us"] for row in rows.values() if _is_contender(row)), default=None)
        cells = []
        for name in names:
            row = rows.get(name, {"reason": "not measured"})
            if not row.get("us"):
                note = notes.setdefault(f"{name}: {row['reason']}", len(notes) + 1)
                cells.append(f"-<sup>{note}</sup>")
            else:
                text = show(row) if row.get("within_bound", True) else f"{show(row)} (inexact)"
                cells.append(f"**{text}**" if row["us"] == best else text)
        ratio = _ratio(rows)
        ends = [f"{ratio:.2f}" if ratio else "-"]
        lines.append(_line([case, *cells, *extra_cells(rows), *ends]))
    lines += ["", " ".join(_conclusions(result))]
    return lines + _footnotes(notes)


def _footnotes(notes: dict[str, int]) -> list[str]:
    if not notes:
        return []
    return ["", *(f"<sup>{number}</sup> {text}<br>" for text, number in notes.items())]


def _conclusions(result: dict) -> list[str]:
    sentences = []
    if ratios := _ratios(result):
        mean, least = geometric_mean(ratios.values()), min(ratios.values())
        sentences.append(f"Ours / best peer: geometric mean **{mean:.3f}**, least {least:.2f}.")
    shares = [
        row["max_error"] / row["error_bound"]
        for row in result["rows"]
        if row["impl"] == OURS and row.get("error_bound")
    ]
    if shares:
        allowed = "of what the accuracy rule allows"
        sentences.append(f"Largest error of ours: {max(shares):.2f} {allowed}.")
    return sentences


def _floor_cells(rows: dict) -> list[str]:
    floor, ours = rows.get("floor", {}).get("us"), rows.get(OURS, {}).get("us")
    return [f"{floor:.1f}" if floor else "-", f"{ours / floor:.2f}" if floor and ours else "-"]


def _over_plain(rows: dict, result: dict) -> str:
    """Our time over that of the same shape without the feature, if there is such a row."""
    row = rows.get(OURS, {})
    if not row.get("us") or not row.get("features"):
        return ""
    keys = ("operation", "B", "T", "S", "N", "K", "H", "dtype", "causal")
    shape = [row[key] for key in keys]
    for other in result["rows"]:
        same = [other[key] for key in keys] == shape
        if same and other["impl"] == OURS and other.get("us") and not other.get("features"):
            return f"{row['us'] / other['us']:.2f}"
    return ""


def _by_case(result: dict, *also: str) -> dict:
    """{case: {implementation: row}} in the order in which the cases were run."""
    cases: dict = {}
    for row in result["rows"]:
        key = (row["case"], *(row[name] for name in also)) if also else row["case"]
        cases.setdefault(key, {})[row["impl"]] = row
    return cases


def _present(result: dict, names) -> list[str]:
    measured = {row["impl"] for row in result["rows"]}
    return [name for name in names if name in measured]


def _is_contender(row: dict) -> bool:
    return bool(row.get("us")) and row["impl"] != "floor"


def _is_peer(name: str, row: dict) -> bool:
    return _is_contender(row) and name not in (OURS, *OWN_VARIANTS)


def _ratio(rows: dict) -> float | None:
    ours = rows.get(OURS, {}).get("us")
    peers = [row["us"] for name, row in rows.items() if _is_peer(name, row)]
    return min(peers) / ours if ours and peers else None


def _ratios(result: dict) -> dict[str, float]:
    ratios = {case: _ratio(rows) for case, rows in _by_case(result).items()}
    return {case: ratio for case, ratio in ratios.items() if ratio}


def _error(row: dict | None, field: str = "max_error") -> str:
    return f"{row[field]:.1e}" if row and row.get(field) is not None else "-"


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns
