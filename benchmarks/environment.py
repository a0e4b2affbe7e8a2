"""What it was measured on: device, driver, versions, and the clock and power of the GPU."""

from __future__ import annotations

import datetime
import pathlib
import re
import shutil
import statistics
import subprocess
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def describe(implementations) -> dict:
    import jax
    import jaxlib
    import peers

    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    return {
        "device": device.device_kind if on_gpu else cpu_model(),
        "platform": device.platform,
        "processors": getattr(device, "core_count", None),
        "driver": _nvidia_smi("driver_version") if on_gpu else None,
        "cuda": f"{int(cuda[1]) // 1000}.{int(cuda[1]) % 1000 // 10}" if cuda else None,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "implementations": {name: peers.version(name) for name in implementations},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def commit() -> str | None:
    """The commit that is checked out, with a mark if the sources differ from it."""
    try:
        git = ["git", "-C", str(REPOSITORY)]
        head = subprocess.check_output(
            [*git, "rev-parse", "--short=10", "HEAD"], text=True, stderr=subprocess.DEVNULL
        )
        sources = ["src", "jax_flashattn", "CMakeLists.txt"]
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *sources]).returncode
        return head.strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return "CPU"
    names = re.findall(r"model name\s*: (.+)", text)
    return f"{names[0]} ({len(names)} threads)" if names else "CPU"


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


class GpuSampler:
    """The SM clock and the power between `start` and `stop`, read every `interval` seconds by calls
    of `sample` from the process that does not measure."""

    def __init__(self, interval: float = 0.1):
        self._interval, self._next = interval, 0.0
        self._samples: list[tuple[float, float]] | None = None
        self._read = _nvml_reader() or _smi_reader()

    def start(self):
        self._samples = []

    def sample(self):
        if self._samples is not None and self._read and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval
            self._samples.append(self._read())

    def stop(self) -> dict:
        samples, self._samples = self._samples, None
        if not samples:
            return {}
        clocks, power = zip(*samples, strict=True)
        return {"sm_mhz": round(statistics.median(clocks)), "power_w": round(max(power))}


def _nvml_reader():
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # absent, or no driver: both mean that there is nothing to read
        return None
    return lambda: (
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    )


def _smi_reader():
    if shutil.which("nvidia-smi") is None:
        return None

    def read():
        clock, power = (_nvidia_smi("clocks.sm,power.draw") or "0, 0").split(",")
        return float(clock), float(power)

    return read


def _nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.check_output(command, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return None
