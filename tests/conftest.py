"""One list of tests for every platform: each test takes the `platform` fixture, cpu or gpu."""

import contextlib
import dataclasses
import os
import pathlib
import sys

# Before jax is imported: sharding is tested on eight CPU devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # cases, calls, check, truth

import hypothesis
import jax
import pytest

from jax_flashattn import _ffi

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

_PROFILE = dict(
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, **_PROFILE)
hypothesis.settings.register_profile("nightly", max_examples=500, **_PROFILE)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption(
        "--architecture", type=int, default=0, metavar="80",
        help="GPU kernels of newer architectures than this are left out",
    )  # fmt: skip


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error")
    if limit := config.getoption("--architecture"):
        _ffi.cuda().limit_architecture(limit)


@dataclasses.dataclass(frozen=True)
class Platform:
    name: str
    devices: tuple

    @property
    def dtype(self):
        """The dtype of tests that do not care: the most exact one that the platform computes in."""
        return "float32" if self.name == "cpu" else "float16"

    def fit(self, case):
        """The case as this platform runs it: float32 stands for any dtype, float64 is the CPU's."""
        if self.name == "cpu":
            return case
        if case.dtype == "float64":
            pytest.skip("float64 is computed on the CPU only")
        return case.replace(dtype=self.dtype) if case.dtype == "float32" else case


def _devices(name):
    try:
        return tuple(jax.devices(name))
    except RuntimeError:
        return ()


@contextlib.contextmanager
def _platform(name):
    devices = _devices(name)
    if not devices:
        pytest.skip(f"no {name} device")
    with jax.default_device(devices[0]):
        yield Platform(name, devices)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def platform(request):
    with _platform(request.param) as platform:
        yield platform


@pytest.fixture
def cpu():
    with _platform("cpu") as platform:
        yield platform
