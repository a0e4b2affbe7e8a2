"""The custom calls: registration, and one function that makes a call by names.

Buffers and attributes are sent by name and checked against the signature that the extension modules
were compiled with, so that the Python and the C++ side cannot drift apart.
"""

import importlib
import importlib.util
import pathlib
import re

import jax
import numpy as np

from jax_flashattn import _cpu

TARGETS = {op: f"flashattn_{op}_v1" for op in _cpu.signature()}
"""Operation -> name of its custom call; the name is part of serialized programs, hence the version."""

CUSTOM_CALLS = tuple(TARGETS.values())
"""What `jax.export` has to allow: `[DisabledSafetyCheck.custom_call(c) for c in CUSTOM_CALLS]`."""

HOW_TO_GET_CUDA = (
    "reinstall with a CUDA compiler (12.8 or later) on PATH, or with the one of PyPI: "
    "JAX_FLASHATTN_NVCC_FROM_PYPI=1 pip install --force-reinstall jax_flashattn"
)

_CASTS = {"float64": np.float64, "int32": np.int32, "bool": np.bool_, "string": str}


def _runtime_ffi_api() -> tuple[int, int]:
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header)[1])
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def _register(module, platform: str) -> None:
    built_for, runs_on = module.ffi_api_version(), _runtime_ffi_api()
    if built_for > runs_on:
        # Registering would leave every JAX call of this process broken, not only ours.
        raise ImportError(
            f"jax_flashattn was built for XLA FFI {built_for}, but this jaxlib has {runs_on}; "
            "install a newer jaxlib or rebuild jax_flashattn here"
        )
    for op, handler in module.targets().items():
        jax.ffi.register_ffi_target(TARGETS[op], handler, platform=platform)


def _load_cuda():
    """The module `_cuda`, or None and why there is none."""
    if importlib.util.find_spec("jax_flashattn._cuda") is None:
        return None, f"this build has no CUDA kernels; {HOW_TO_GET_CUDA}"
    try:
        module = importlib.import_module("jax_flashattn._cuda")
        _register(module, "CUDA")
    except ImportError as e:
        return None, f"the CUDA kernels failed to load ({e})"
    return module, None


_register(_cpu, "cpu")
_cuda, cuda_problem = _load_cuda()


def cuda():
    """The extension module with the CUDA kernels; NotImplementedError where there is none."""
    if _cuda is None:
        raise NotImplementedError(f"jax_flashattn: no kernel for CUDA: {cuda_problem}")
    return _cuda


def signature(op: str | None = None):
    """The compiled signature of one operation (or of all): its operands, results and attributes."""
    return _cpu.signature() if op is None else _cpu.signature()[op]


_SIGNATURES = _cpu.signature()


def call(op: str, operands: dict, results: dict, **attributes) -> dict:
    """Makes the custom call of `op`.

    operands: name -> array. results: name -> jax.ShapeDtypeStruct. attributes: every attribute but the
    names of the buffers. Returns name -> array.
    """
    native = _SIGNATURES[op]
    for kind, given in (("operands", operands), ("results", results)):
        unknown = set(given) - {name for name, _ in native[kind]}
        if unknown:
            raise TypeError(f"{op}: {kind} {sorted(unknown)} are not in the native signature")
    attributes |= {"operands": ",".join(operands), "results": ",".join(results)}
    if set(attributes) != set(native["attributes"]):
        raise TypeError(
            f"{op}: attributes {sorted(attributes)} but the native signature has "
            f"{sorted(native['attributes'])}"
        )
    cast = {name: _CASTS[kind](attributes[name]) for name, kind in native["attributes"].items()}
    outs = jax.ffi.ffi_call(TARGETS[op], tuple(results.values()))(*operands.values(), **cast)
    return dict(zip(results, outs, strict=True))
