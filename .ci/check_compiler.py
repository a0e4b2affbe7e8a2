"""Fails if ptxas spilled a register or serialised a wgmma in any kernel of the build log.

Both cost a large part of a kernel's speed and show in no test.
"""

import pathlib
import re
import sys

text = pathlib.Path(sys.argv[1]).read_text(errors="replace")
functions = len(re.findall(r"bytes spill stores", text))
bad = [
    line
    for line in text.splitlines()
    if re.search(r"\bC75\d\d\b|setmaxnreg.*ignored", line)
    or any(int(n) for n in re.findall(r"(\d+) bytes spill", line))
]
print(f"ptxas reported {functions} functions, {len(bad)} complaints")
if bad or not functions:
    sys.exit("\n".join(bad) or "the log holds no report of ptxas: was CUDA built?")
