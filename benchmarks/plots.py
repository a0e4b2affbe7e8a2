"""Results as figures. matplotlib is imported when one is drawn: the tables do without."""

from __future__ import annotations

import pathlib

from names import PEERS
from tables import OURS

COLORS = {
    "flash_sm80": "tab:pink",
    "flash_deterministic": "tab:brown",
    OURS: "black",
    "cudnn": "tab:green",
    "fa3": "tab:orange",
    "tokamax": "tab:blue",
    "tokamax_tuned": "tab:cyan",
    "pallas": "tab:purple",
    "t_cudnn": "tab:olive",
    "t_flash2": "tab:red",
    "xla": "tab:gray",
    "floor": "tab:gray",
}


def throughput(result: dict, path: pathlib.Path):
    """TFLOP/s over the length, a panel for each head dim and mask, and the matrix product."""
    rows = [row for row in result["rows"] if row.get("tflops") and row["dtype"] == "bfloat16"]
    rows = [row for row in rows if row["N"] == row["K"]]
    head_dims = sorted({row["H"] for row in rows})
    figure, axes = _panels(2, max(1, len(head_dims)))
    ceiling = result["meta"].get("ceilings", {}).get("matmul_bf16_tflops")
    for line, causal in zip(axes, (False, True), strict=True):
        for axis, head_dim in zip(line, head_dims, strict=False):
            here = [row for row in rows if row["H"] == head_dim and row["causal"] == causal]
            _lines(axis, here, "T", "tflops")
            if ceiling:
                axis.axhline(ceiling, color="gray", linestyle=":", label="8192 matrix product")
            axis.set(title=f"H {head_dim}, {'causal' if causal else 'full'}", ylim=(0, None))
            axis.set_ylabel("TFLOP/s")
            _lengths(axis, rows)
    _save(figure, axes, path)


def decode(result: dict, path: pathlib.Path):
    """The time over the bytes of the cache, with the time in which they can be read."""
    figure, axes = _panels(1, 1, size=6)
    axis = axes[0][0]
    rows = [row | {"MB": row["gbps"] * row["us"] / 1e3} for row in result["rows"] if row.get("us")]
    _lines(axis, rows, "MB", "us")
    axis.set(xscale="log", yscale="log", xlabel="cache, MB", ylabel="microseconds")
    _save(figure, axes, path)


def errors(result: dict, path: pathlib.Path):
    """The largest error against float64 over the length."""
    rows = [row for row in result["rows"] if row.get("max_error") is not None]
    dtypes = sorted({row["dtype"] for row in rows})
    figure, axes = _panels(2, max(1, len(dtypes)))
    for line, causal in zip(axes, (False, True), strict=True):
        for axis, dtype in zip(line, dtypes, strict=False):
            here = [row for row in rows if row["dtype"] == dtype and row["causal"] == causal]
            _lines(axis, here, "T", "max_error")
            axis.set(yscale="log", ylabel="largest error")
            _lengths(axis, rows)
            axis.set_title(f"{dtype}, {'causal' if causal else 'full'}")
    _save(figure, axes, path)


def training(result: dict, path: pathlib.Path):
    """The loss curves, and how far each is from the reference."""
    runs, reference = result["runs"], result["reference"]
    figure, axes = _panels(1, 2)
    curves, differences = axes[0]
    base = runs[reference]["losses"]
    twin = {"losses": result["twin"]["losses"]}
    for name, run in (runs | {f"{reference}, rounded anew": twin}).items():
        style = {"color": COLORS.get(name, "lightgray"), "linewidth": 1}
        label = "ours" if name == OURS else name
        if name in runs:
            curves.plot(run["losses"], label=label, **style)
        if name != reference:
            apart = [loss - other for loss, other in zip(run["losses"], base, strict=True)]
            differences.plot(apart, label=label, **style)
    curves.set(
        xlabel="step", ylabel="loss, nats per byte", title=f"T {result['settings']['length']}"
    )
    differences.set(xlabel="step", ylabel=f"loss - loss of {reference}")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    _save(figure, axes, path)


def _panels(rows: int, columns: int, size: float = 4):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "jax_flashattn"  # the same file from the same numbers
    shape = (size * columns + 1.5, 0.8 * size * rows)
    return pyplot.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")


def _lengths(axis, rows: list[dict]):
    """The length on a logarithmic axis, with the lengths that were measured as its marks."""
    lengths = sorted({row["T"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.set_xlabel("T")


def _lines(axis, rows: list[dict], x: str, y: str):
    for name in (OURS, *PEERS, "floor"):
        points = sorted((row[x], row[y]) for row in rows if row["impl"] == name)
        if points:
            style = {"linestyle": ":"} if name == "floor" else {"marker": "o", "markersize": 4}
            label = "ours" if name == OURS else name
            axis.plot(*zip(*points, strict=True), color=COLORS[name], label=label, **style)
    axis.grid(alpha=0.3)


def _save(figure, axes, path: pathlib.Path):
    labels = {}
    for axis in axes.flat:
        handles, names = axis.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
