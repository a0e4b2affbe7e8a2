"""python -m jax_flashattn info: versions, devices, and which kernels this build has."""

import jax
import jaxlib

import jax_flashattn
from jax_flashattn import _cpu, _ffi


def cuda_summary() -> str:
    if _ffi.cuda_problem is not None:
        return f"none: {_ffi.cuda_problem}"
    return _ffi.cuda().build_summary()


def run(args) -> int:
    print(
        f"jax_flashattn {jax_flashattn.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    )
    print(f"devices        {', '.join(str(d) for d in jax.devices())}")
    print(f"CPU kernels    {_cpu.instruction_set()}")
    print(f"CUDA kernels   {cuda_summary()}")
    print(f"custom calls   {', '.join(_ffi.CUSTOM_CALLS)}, XLA FFI {_cpu.ffi_api_version()}")
    return 0
