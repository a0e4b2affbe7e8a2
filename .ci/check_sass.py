"""Checks the kernels' machine code: what the compiler may undo without a word.

No kernel for any architecture may keep anything in local memory. In the Hopper prefill the exponentials
of a block must stand between the wait for its scores and the wait for the previous block's product, so
that they run under that product; ptxas hoists the second wait above them unless a branch lies between
(docs/kernels/prefill_sm90.md). The plain lean decode must not wait for the query, or anything else
that it loads, before it has asked for the first keys (docs/kernels/decode.md).
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
    """(name, instructions, their control words) of each kernel."""
    text = subprocess.run([build.tool("nvdisasm"), "-c", "-hex", cubin], check=True,
                          capture_output=True, text=True).stdout  # fmt: skip
    for part in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        name = part.split(",", 1)[0]
        found = re.findall(
            r"^\s+/\*[0-9a-f]+\*/\s+(.*?);\s*/\* 0x[0-9a-f]+ \*/\s*/\* 0x([0-9a-f]+) \*/",
            part,
            re.M,
        )
        # The upper half of an instruction ends in its control word.
        yield name, [text for text, _ in found], [int(upper, 16) >> 41 for _, upper in found]


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


def waits_before_first_copy(instructions, control) -> int:
    """How many instructions in front of the first asynchronous copy wait for a load from global memory."""
    copy = next(i for i, text in enumerate(instructions) if "LDGSTS" in text)
    # Of a control word: the scoreboard that the result reports to, and a mask of those waited for.
    loads = sum({1 << (control[i] >> 5 & 7) for i in range(copy) if "LDG.E" in instructions[i]})
    return sum(bool(control[i] >> 11 & 63 & loads) for i in range(copy))


def main() -> None:
    compiled = build.resources(pathlib.Path(jax_flashattn._cuda.__file__))
    problems = [
        f"{kernel['symbol']} ({kernel['architecture']}): {kernel['local']} bytes of local memory"
        for kernel in compiled
        if kernel["local"]
    ]
    checked = lean = 0
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(jax_flashattn._cuda.__file__, folder):
            for name, instructions, control in functions(cubin):
                local = sum(bool(re.search(r"\b(STL|LDL)\b", i)) for i in instructions)
                if local:
                    problems.append(f"{name}: {local} accesses to local memory")
                if re.search(r"decode_lean_kernelI.*ELb0E", name):
                    lean += 1
                    if waits := waits_before_first_copy(instructions, control):
                        problems.append(f"{name}: {waits} waits for a load before the first copy")
                if "prefill" not in name or not any("HGMMA" in i for i in instructions):
                    continue
                checked += 1
                between = exponentials_between_waits(instructions)
                if between < 32:
                    problems.append(f"{name}: {between} exponentials between the two waits")
    print(
        f"{len(compiled)} kernels, {checked} Hopper prefill and {lean} lean decode among them, checked"
    )
    if problems or not checked or not lean:
        sys.exit(
            "\n".join(problems) or "no Hopper prefill kernel with wgmma, or no lean decode, found"
        )


if __name__ == "__main__":
    main()
