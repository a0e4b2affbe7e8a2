"""The floor: a kernel that does nothing but read bytes, launched through the CUDA driver.

It is the least time in which any kernel can have seen its inputs, launch included. Written in PTX,
which the driver compiles by itself, so that no compiler has to be installed.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
from timing import Call

THREADS = 256
BLOCKS_PER_SM = (1, 2, 4, 8)
BUFFER_BYTES = 5 << 28  # 1.25 GiB: the largest cache of the tables, and room to move in it
MOVE_BYTES = 68 << 20  # from one call to the next, so that what is read is cold
LOADS = 8  # 16-byte loads that a thread has in flight


def _vector(i: int) -> str:
    return "{" + ", ".join(f"%v{4 * i + j}" for j in range(4)) + "}"


_LOAD = """
  setp.lt.u64 %inside, %index, %vectors;
  mad.lo.u64 %address, %index, 16, %data;
  @%inside ld.global.nc.v4.u32 VECTOR, [%address];
  add.u64 %index, %index, %threads;"""

# Thread i reads the vectors i, i + threads, i + 2 threads, ... and folds them by xor. The fold is
# stored only if it has one certain value: the loads must stay, a store is next to never made.
_PTX = f"""
.version 7.4
.target sm_80
.address_size 64
.visible .entry stream_read(.param .u64 data, .param .u64 vectors, .param .u64 sink)
{{
  .reg .pred %inside, %found;
  .reg .b32 %block, %width, %thread, %grid, %fold, %v<{4 * LOADS}>;
  .reg .b64 %data, %vectors, %sink, %index, %threads, %address, %offset;
  ld.param.u64 %data, [data];
  ld.param.u64 %vectors, [vectors];
  ld.param.u64 %sink, [sink];
  mov.u32 %block, %ctaid.x;
  mov.u32 %width, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %grid, %nctaid.x;
  mul.wide.u32 %index, %block, %width;
  cvt.u64.u32 %offset, %thread;
  add.u64 %index, %index, %offset;
  mul.wide.u32 %threads, %grid, %width;
  mov.u32 %fold, 0;
  {"".join(f"mov.u32 %v{i}, 0; " for i in range(4 * LOADS))}
more:
{"".join(_LOAD.replace("VECTOR", _vector(i)) for i in range(LOADS))}
  {"".join(f"xor.b32 %fold, %fold, %v{i}; " for i in range(4 * LOADS))}
  setp.lt.u64 %inside, %index, %vectors;
  @%inside bra more;
  setp.eq.u32 %found, %fold, 305419896;
  @%found st.global.u32 [%sink], %fold;
  ret;
}}
"""


class StreamReader:
    """Calls that read the given number of bytes, one for each size of grid."""

    def __init__(self):
        if jax.default_backend() != "gpu":
            raise NotImplementedError("the floor is measured on a GPU only")
        values = jax.jit(lambda: jax.random.normal(jax.random.key(0), (BUFFER_BYTES // 4,)))()
        self._buffer, self._sink = values, jnp.zeros(1)
        jax.block_until_ready((self._buffer, self._sink))
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)
        processors = ctypes.c_int()
        multiprocessor_count = 16
        self._check("cuDeviceGetAttribute", ctypes.byref(processors), multiprocessor_count, device)
        self._processors = processors.value
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(module), _PTX.encode())
        self._check("cuModuleGetFunction", ctypes.byref(self._function), module, b"stream_read")

    def calls(self, size: int) -> dict[str, Call]:
        size = min(size, BUFFER_BYTES) // 16 * 16
        room = BUFFER_BYTES - size

        def call(blocks):
            def start(copy):
                offset = copy * MOVE_BYTES % (room + 1) // 16 * 16
                self._launch(blocks, offset, size)

            return Call(start, lambda _: self._check("cuCtxSynchronize"))

        grids = [self._processors * n for n in BLOCKS_PER_SM]
        return {f"{blocks} blocks": call(blocks) for blocks in grids}

    def _launch(self, blocks: int, offset: int, size: int):
        arguments = [
            ctypes.c_uint64(self._buffer.unsafe_buffer_pointer() + offset),
            ctypes.c_uint64(size // 16),
            ctypes.c_uint64(self._sink.unsafe_buffer_pointer()),
        ]
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
        grid, block, shared_memory, stream = (blocks, 1, 1), (THREADS, 1, 1), 0, None
        self._check(
            "cuLaunchKernel", self._function, *grid, *block, shared_memory, stream, pointers, None
        )

    def _check(self, function: str, *arguments):
        status = getattr(self.driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")
