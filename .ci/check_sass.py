"""Checks the kernels' machine code: what the compiler may undo without a word.

No kernel for any architecture may keep anything in local memory. In the Hopper prefill the exponentials
of a block must stand between the wait for its scores and the wait for the previous block's product, so
that they run under that product; ptxas hoists the second wait above them unless a branch lies between
(docs/kernels/prefill_sm90.md).
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import jax_flashattn._cuda

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))
import build  # noqa: E402


def cubins(module: str, folder: str) -> list[pathlib.Path]:
    subprocess.run([build.tool("cuobjdump"), "-xelf", "sm_90a", module], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return sorted(pathlib.Path(folder).glob("*.cubin"))


def functions(cubin: pathlib.Path):
    """(name, instructions) of each kernel."""
    text = subprocess.run([build.tool("nvdisasm"), "-c", cubin], check=True, capture_output=True,
                          text=True).stdout  # fmt: skip
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        name = part.split(",", 1)[0]
        yield name, re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", part, re.M)


def exponentials_between_waits(instructions) -> int:
    """The most exponentials found after a wait that leaves one product in flight and before the next."""
    best = since = 0
    counting = False
    for text in instructions:
        if "DEPBAR" in text or "WARPGROUP.DEPBAR" in text:
            pending = re.search(r"gsb0, (0x[0-9a-f]+)", text)
            if pending:
                if counting:
                    best = max(best, since)
                counting, since = int(pending[1], 16) == 1, 0
        elif "MUFU.EX2" in text and counting:
            since += 1
    return best


def main() -> None:
    compiled = build.resources(pathlib.Path(jax_flashattn._cuda.__file__))
    problems = [
        f"{kernel['symbol']} ({kernel['architecture']}): {kernel['local']} bytes of local memory"
        for kernel in compiled
        if kernel["local"]
    ]
    checked = 0
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(jax_flashattn._cuda.__file__, folder):
            for name, instructions in functions(cubin):
                local = sum(bool(re.search(r"\b(STL|LDL)\b", i)) for i in instructions)
                if local:
                    problems.append(f"{name}: {local} accesses to local memory")
                if "prefill" not in name or not any("HGMMA" in i for i in instructions):
                    continue
                checked += 1
                between = exponentials_between_waits(instructions)
                if between < 32:
                    problems.append(f"{name}: {between} exponentials between the two waits")
    print(f"{len(compiled)} kernels, {checked} of them Hopper prefill kernels, checked")
    if problems or not checked:
        sys.exit("\n".join(problems) or "no Hopper prefill kernel with wgmma was found")


if __name__ == "__main__":
    main()
