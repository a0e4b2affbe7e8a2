#include "device.h"

#include <cudaTypedefs.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace flashattn {
namespace {

std::atomic<int> architecture_limit{0};

Status failure(const std::string& what, cudaError_t error) {
  return {what + ": " + cudaGetErrorString(error)};
}

std::string describe(const Launch& what) {
  return std::string(what.kernel_name) + " (grid " + std::to_string(what.grid.x) + "x" +
         std::to_string(what.grid.y) + "x" + std::to_string(what.grid.z) + ", " +
         std::to_string(what.threads) + " threads, " + std::to_string(what.shared_memory) +
         " B shared memory)";
}

cudaError_t look_up(int ordinal, Device* device) {
  const std::pair<cudaDeviceAttr, int*> facts[] = {
      {cudaDevAttrComputeCapabilityMajor, &device->major},
      {cudaDevAttrComputeCapabilityMinor, &device->minor},
      {cudaDevAttrMultiProcessorCount, &device->sm_count},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_memory_per_block}};
  device->ordinal = ordinal;
  for (const auto& [attribute, value] : facts) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The limit is 48 KB, less a kernel's static memory, until it asks for more, on each device anew.
// What L1 would keep of an SM's memory is better used for the shared memory of another block.
Status configure_shared_memory(const Launch& what, const Device& device) {
  constexpr int kDefaultLimit = 46 * 1024;  // none that has dynamic memory has 2 KB of static
  if (what.shared_memory == 0) return {};
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> limits;
  const std::lock_guard<std::mutex> lock(mutex);
  int& limit = limits[{what.kernel, device.ordinal}];
  const auto set = [&](cudaFuncAttribute attribute, int value) -> Status {
    const cudaError_t error = cudaFuncSetAttribute(what.kernel, attribute, value);
    if (error == cudaSuccess) return {};
    return failure(describe(what) + ": shared memory refused", error);
  };
  if (limit == 0) {
    if (Status status =
            set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        !status.ok())
      return status;
    limit = kDefaultLimit;
  }
  if (what.shared_memory <= limit) return {};
  if (Status status = set(cudaFuncAttributeMaxDynamicSharedMemorySize, what.shared_memory);
      !status.ok())
    return status;
  limit = what.shared_memory;
  return {};
}

PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function) : nullptr;
  }();
  return encoder;
}

// One axis of a tensor map. The stride, in elements, is the distance to the next entry of this
// axis.
struct Axis {
  int64_t size, stride;
  int box;
};

template <size_t Rank>
Status encode(CUtensorMap* map, const TensorMapShape& shape, const std::array<Axis, Rank>& axes) {
  const auto encoder = tensor_map_encoder();
  if (encoder == nullptr) return {"tensor map: the driver has no cuTensorMapEncodeTiled"};
  cuuint64_t sizes[Rank], strides[Rank - 1];
  cuuint32_t box[Rank], ones[Rank];
  for (size_t i = 0; i < Rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(axes[i].size);
    box[i] = static_cast<cuuint32_t>(axes[i].box);
    ones[i] = 1;
    // An axis of one entry is never walked; its stride only has to be a legal one.
    if (i > 0)
      strides[i - 1] = axes[i].size == 1 ? 16 : static_cast<cuuint64_t>(axes[i].stride * 2);
  }
  const CUresult result =
      encoder(map, shape.bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
              Rank, const_cast<void*>(shape.data), sizes, strides, box, ones,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  std::string message = "tensor map refused, error " + std::to_string(result) + ", axes";
  for (const Axis& axis : axes)
    message += " " + std::to_string(axis.size) + " (stride " + std::to_string(axis.stride) +
               ", box " + std::to_string(axis.box) + ")";
  return {message};
}

}  // namespace

Status device_facts(int ordinal, Device* device) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static std::array<Device, kMaxDevices> known;  // sm_count 0: not looked up yet
  if (ordinal < 0 || ordinal >= kMaxDevices)
    return {"device ordinal " + std::to_string(ordinal) + " is out of range"};
  const std::lock_guard<std::mutex> lock(mutex);
  if (known[ordinal].sm_count == 0) {
    Device facts;
    const cudaError_t error = look_up(ordinal, &facts);
    if (error != cudaSuccess)
      return failure("attributes of device " + std::to_string(ordinal), error);
    known[ordinal] = facts;
  }
  *device = known[ordinal];
  const int limit = architecture_limit;
  if (limit > 0 && limit < 10 * device->major + device->minor) {
    device->major = limit / 10;
    device->minor = limit % 10;
  }
  return {};
}

void limit_architecture(int compute_capability) { architecture_limit = compute_capability; }

Status launch(const Launch& what, void** args, const Device& device, cudaStream_t stream) {
  if (Status status = configure_shared_memory(what, device); !status.ok()) return status;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (what.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = what.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (what.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = what.grid;
  config.blockDim = dim3(what.threads);
  config.dynamicSmemBytes = what.shared_memory;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelExC(&config, what.kernel, args);
  return error == cudaSuccess ? Status{} : failure(describe(what) + ": launch failed", error);
}

Status encode_tensor_map(CUtensorMap* map, const TensorMapShape& shape) {
  if (shape.head_dim % 64 != 0)
    return {"tensor map: head_dim " + std::to_string(shape.head_dim) + " is not a multiple of 64"};
  return encode<5>(map, shape,
                   {{{64, 1, 64},
                     {shape.rows, shape.row_stride, shape.box_rows},
                     {shape.head_dim / 64, 64, shape.box_chunks},
                     {shape.heads, shape.head_stride, 1},
                     {shape.batches, shape.batch_stride, 1}}});
}

Status encode_tensor_map_4d(CUtensorMap* map, const TensorMapShape& shape) {
  return encode<4>(map, shape,
                   {{{shape.head_dim, 1, 64},
                     {shape.rows, shape.row_stride, shape.box_rows},
                     {shape.heads, shape.head_stride, 1},
                     {shape.batches, shape.batch_stride, 1}}});
}

Status encode_tensor_map_packed(CUtensorMap* map, const TensorMapShape& shape, int group) {
  return encode<5>(map, shape,
                   {{{shape.head_dim, 1, 64},
                     {group, shape.head_stride, group},
                     {shape.rows, shape.row_stride, shape.box_rows},
                     {shape.heads / group, shape.head_stride * group, 1},
                     {shape.batches, shape.batch_stride, 1}}});
}

}  // namespace flashattn
