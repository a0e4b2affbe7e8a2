"""What a build costs and what it makes: seconds, bytes, and what every CUDA kernel takes of an SM.

    python benchmarks/build.py [--tree DIRECTORY]

Makes a clean build of the wheel and writes benchmarks/results/build.json, from which report.py makes
tables. Needs what a build needs (CONTRIBUTING.md), nvcc, cuobjdump and nm. Registers and static
shared memory are read from the machine code; threads and dynamic shared memory are what the build's
own launchers ask for (launches.cc). With --tree an existing build directory is read and the cost of
the last clean build stays in the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request

import environment
from cases import DECODE_SHAPES
from results import DIRECTORY

ROOT = environment.REPOSITORY
FILE = DIRECTORY / "build.json"
ARCHITECTURE = "sm_90a"  # that launches.cc asks about
PEERS = ("flash-attn-jax", "flash-attn3-jax")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=pathlib.Path, metavar="DIRECTORY")
    tree = parser.parse_args().tree
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        if tree:
            cost = json.loads(FILE.read_text())["meta"]["cost"] if FILE.exists() else None
        else:
            tree = work / "tree"
            cost = clean_build(tree, work)
        compiled = resources(module_of(tree))
        launched = launches(tree.resolve(), work)
    meta = {
        "date": datetime.date.today().isoformat(),
        "commit": environment.commit(),
        "cuda": cuda_version(),
        "cost": cost,
        "peers": [published(name) for name in PEERS],
    }
    launched["launches"] = with_resources(launched["launches"], compiled)
    write({"meta": meta} | launched | {"kernels": compiled})
    local = sum(kernel["local"] > 0 for kernel in compiled)
    print(f"{len(compiled)} kernels, {local} with local memory; {FILE}")


def clean_build(tree: pathlib.Path, folder: pathlib.Path) -> dict:
    """Builds a wheel; its cost and its size."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["-C", f"build-dir={tree}", "-C", "cmake.define.JAX_FLASHATTN_CUDA=ON"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*command, "-w", folder, ROOT], check=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (wheel,) = folder.glob("*.whl")
    return {
        "seconds": round(seconds),
        "processor_seconds": round(processor),
        "processor": environment.cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": environment.commit(),
        "date": datetime.date.today().isoformat(),
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "cuda_module_bytes": module_of(tree).stat().st_size,
    }


def module_of(tree: pathlib.Path) -> pathlib.Path:
    (module,) = tree.glob("_cuda*.so")
    return module


# ---- the machine code


def resources(module: pathlib.Path) -> list[dict]:
    command = [tool("cuobjdump"), "--dump-resource-usage", module]
    return parse_resources(subprocess.check_output(command, text=True))


def parse_resources(text: str) -> list[dict]:
    """Of each kernel for each architecture; `local` is stack and spills, in bytes a thread."""
    kernels, architecture, symbol = {}, None, None
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            symbol = match[1]
        elif "REG:" in line:
            field = {name: int(n) for name, n in re.findall(r"([A-Z]+):(\d+)", line)}
            kernels[architecture, symbol] = {
                "architecture": architecture,
                "symbol": symbol,
                "registers": field["REG"],
                "shared": field["SHARED"],
                "local": field["STACK"] + field["LOCAL"],
            }
    return list(kernels.values())


def launches(tree: pathlib.Path, folder: pathlib.Path) -> dict[str, list[dict]]:
    """What launches.cc says: the kernels of some calls, the tiles of the Hopper forward, and how
    the calls of the decode benchmark are cut."""
    source, program = ROOT / "benchmarks" / "launches.cc", folder / "launches"
    objects = tree / "CMakeFiles"
    launcher = objects / "_cuda.dir" / "src" / "cuda" / "launch.cc.o"
    includes = [f"-I{ROOT}/src", f"-I{ROOT}/src/cuda"]
    libraries = [f"-L{path}" for path in toolkit_libraries()]
    compiler = [tool("nvcc"), "-std=c++17"]
    subprocess.run(
        [*compiler, *includes, "-x", "cu", "-c", source, "-o", f"{program}.o"], check=True
    )
    subprocess.run(
        [*compiler, f"{program}.o", launcher, *objects.glob("*.dir/generated/*.o"), *libraries]
        + ["-o", program],
        check=True,
    )
    shapes = [",".join(map(str, shape)) for shape in DECODE_SHAPES]
    answer = subprocess.check_output([program, *shapes], text=True)
    return parse_launches(answer, subprocess.check_output(["nm", program], text=True))


def parse_launches(text: str, symbols: str) -> dict[str, list[dict]]:
    named = {}
    for line in symbols.splitlines():
        if match := re.match(r"([0-9a-f]+) [tTwW] (\S+)", line):
            # nvcc makes templates local on the host (the L), not on the device.
            named[int(match[1], 16)] = match[2].replace("9flashattnL", "9flashattn", 1)
    main = next(address for address, name in named.items() if name == "main")
    found, tiles, plans = [], [], []
    for line in text.splitlines():
        kind, *fields = line.split(" ", 5)
        if kind == "call":
            head_dim, call = line.split(" ", 2)[1:]
        elif kind == "kernel":
            distance, threads, shared, cluster = map(int, fields[:4])
            what = {"call": call, "head_dim": int(head_dim), "kernel": fields[4]}
            what |= {"symbol": named[main + distance], "threads": threads}
            found.append(what | {"dynamic_shared": shared, "cluster": cluster})
        elif kind == "tile":
            head_dim, causal, max_q_len, rows, keys = map(int, line.split(" ")[1:])
            tile = {"head_dim": head_dim, "causal": bool(causal), "max_q_len": max_q_len}
            tiles.append(tile | {"rows": rows, "keys": keys})
        elif kind == "plan":
            shape, splits, cluster, extra, lean, reason = line.split(" ", 6)[1:]
            plan = {"shape": [int(n) for n in shape.split(",")], "splits": int(splits)}
            plan |= {"cluster": int(cluster), "extra_blocks": int(extra), "lean": lean == "1"}
            plans.append(plan | {"reason": reason})
        else:
            raise SystemExit(f"{call}, head dim {head_dim}: {line}")
    return {"launches": found, "prefill_tiles": tiles, "decode_plans": plans}


def with_resources(calls: list[dict], compiled: list[dict]) -> list[dict]:
    of = {k["symbol"]: k for k in compiled if k["architecture"] == ARCHITECTURE}
    rows = []
    for launch in calls:
        kernel = of[launch["symbol"]]
        # From sm_90 on the static part includes the 1 KB that the system takes of every block.
        shared = launch["dynamic_shared"] + kernel["shared"]
        blocks = blocks_per_sm(kernel["registers"], launch["threads"], shared)
        row = launch | {"registers": kernel["registers"], "shared": shared}
        rows.append(row | {"blocks_per_sm": blocks})
    return rows


def blocks_per_sm(registers: int, threads: int, shared: int) -> int:
    """That fit an SM of compute capability 9.0 (technical specifications in the CUDA C++
    Programming Guide): 64 K registers, given out by 8 a thread, 228 KB, 2048 threads, 32 blocks."""
    by_registers = (64 << 10) // (-(-registers // 8) * 8 * threads)
    return min(by_registers, (228 << 10) // shared, 2048 // threads, 32)


# ---- the tools, and the others


def tool(name: str) -> str:
    """On PATH, or among the packages of PyPI in this Python."""
    packages = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia")
    found = shutil.which(name) or next(map(str, sorted(packages.glob(f"cu*/bin/{name}"))), None)
    if not found:
        raise SystemExit(f"{name} is needed (pip install nvidia-cuda-{name})")
    return found


def toolkit_libraries() -> list[pathlib.Path]:
    toolkit = pathlib.Path(tool("nvcc")).resolve().parent.parent
    return [path for path in (toolkit / "lib64", toolkit / "lib") if path.exists()]


def cuda_version() -> str:
    text = subprocess.check_output([tool("nvcc"), "--version"], text=True)
    return re.search(r"release ([\d.]+)", text)[1]


def published(name: str) -> dict:
    """The newest wheel of a package for Linux on x86-64, by PyPI."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as answer:
        project = json.load(answer)
    wheels = [
        file
        for file in project["urls"]
        if file["packagetype"] == "bdist_wheel" and "x86_64" in file["filename"]
    ]
    wheel = max(wheels, key=lambda file: file["filename"])
    return {
        "package": name,
        "version": project["info"]["version"],
        "wheel": wheel["filename"],
        "wheel_bytes": wheel["size"],
    }


def write(result: dict):
    """A line for each row, so that a change shows."""
    parts = [f'"meta": {json.dumps(result["meta"], indent=1)}']
    for name, rows in result.items():
        if name == "meta":
            continue
        rows = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n{rows}\n]')
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
