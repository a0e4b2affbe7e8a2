// What the launchers know of the GPU of a call, and how they report failure.
#ifndef FLASHATTN_CUDA_DEVICE_H_
#define FLASHATTN_CUDA_DEVICE_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace flashattn {

struct Device {
  int ordinal = 0, major = 0, minor = 0, sm_count = 0;
  int shared_memory_per_block = 0;  // the opt-in limit, bytes
};

// Empty on success, else a sentence for the user. The message names the kernel and the launch.
struct [[nodiscard]] Status {
  std::string message;
  bool ok() const { return message.empty(); }
};

// Facts of one device, looked up once. Its compute capability is at most the limit.
Status device_facts(int ordinal, Device* device);

// Calls from now on leave out what newer architectures than this (10 * major + minor; 0: no limit)
// have kernels for, so that one GPU tests and measures both those and the generic ones.
void limit_architecture(int compute_capability);

// Launches `kernel(args...)` through cudaLaunchKernelEx after raising its dynamic shared memory
// limit (once per kernel and device); the error names `kernel_name`, the grid and the shared
// memory.
struct Launch {
  const char* kernel_name;
  const void* kernel;
  dim3 grid;
  int threads;
  int shared_memory;
  int cluster = 1;            // blocks along x
  bool programmatic = false;  // programmatic dependent launch
};
Status launch(const Launch& what, void** args, const Device& device, cudaStream_t stream);

// A tensor map over a Strided view for tma_load_5d: dimensions {64, rows, head_dim / 64, heads,
// batch}. Columns beyond head_dim and rows beyond `rows` read as zero and are not stored.
struct TensorMapShape {
  const void* data;
  bool bf16;     // else fp16
  int head_dim;  // of the tensor in memory, a multiple of 8
  int64_t rows, heads, batches;
  int64_t row_stride, head_stride, batch_stride;  // elements
  int box_rows, box_chunks;
};
Status encode_tensor_map(CUtensorMap* map, const TensorMapShape& shape);

// The same view for tma_load_4d: dimensions {head_dim, rows, heads, batches}, a box of 64 columns
// and box_rows rows. It serves every head_dim; above, head_dim must be a multiple of 64.
Status encode_tensor_map_4d(CUtensorMap* map, const TensorMapShape& shape);

// The same view with `group` neighbouring heads as rows of one position, for tma_load_packed:
// dimensions {head_dim, group, rows, heads / group, batches}, a box of 64 columns, `group` heads
// and box_rows rows.
Status encode_tensor_map_packed(CUtensorMap* map, const TensorMapShape& shape, int group);

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DEVICE_H_
