// The module `_cuda`: the custom calls for XLA's CUDA backend. It loads where there is no GPU and
// no driver: the runtime is linked statically, and nothing is called before a kernel is.
#include <cuda_runtime_api.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../bindings.h"
#include "../ffi.h"
#include "../make_params.h"
#include "backward_plan.h"
#include "backward_sm80_plan.h"
#include "decode_plan.h"
#include "device.h"
#include "explain.h"
#include "instances.h"
#include "launch.h"
#include "mask_bits.h"
#include "selftest.h"

namespace flashattn {
namespace {

template <class Attrs, class Make, class Launch>
ffi::Error handle(const char* op, cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, const ffi::Dictionary& dictionary,
                  const std::vector<BufferName>& operands, const std::vector<BufferName>& results,
                  Make&& make_params, Launch&& launch_on) {
  auto attrs = decode_attrs<Attrs>(op, dictionary);
  if (!attrs.has_value()) return attrs.error();
  auto call = bind_call(op, *attrs, args, rets, operands, results);
  if (!call.has_value()) return call.error();
  auto params = make_params(*attrs, *call);
  if (!params.has_value()) return params.error();
  Device device;
  Status status = device_facts(ordinal, &device);
  if (status.ok()) status = launch_on(*params, device, stream);
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": " + status.message);
}

ffi::Error prefill(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle<PrefillAttrs>("prefill", stream, ordinal, args, rets, attrs, kPrefillOperands,
                              kPrefillResults, make_prefill_params,
                              [](const PrefillParams& params, const Device& device,
                                 cudaStream_t s) { return launch_prefill(params, device, s); });
}
ffi::Error backward(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle<BackwardAttrs>("backward", stream, ordinal, args, rets, attrs, kBackwardOperands,
                               kBackwardResults, make_backward_params,
                               [](const BackwardParams& params, const Device& device,
                                  cudaStream_t s) { return launch_backward(params, device, s); });
}
ffi::Error decode(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle<DecodeAttrs>("decode", stream, ordinal, args, rets, attrs, kDecodeOperands,
                             kDecodeResults, make_decode_params,
                             [](const DecodeParams& params, const Device& device, cudaStream_t s) {
                               return launch_decode(params, device, s);
                             });
}

auto binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}
// Capturable in a CUDA graph: no allocation, no synchronisation, no read of device memory by the
// host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(PrefillHandler, prefill, binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardHandler, backward, binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeHandler, decode, binding(),
                              {ffi::Traits::kCmdBufferCompatible});

// ---- workspaces, from what Python says of a call

using MaskShape = std::optional<std::array<int64_t, 4>>;  // none: no mask

std::optional<Broadcast> mask_of_shape(const MaskShape& shape) {
  if (!shape) return std::nullopt;
  return contiguous_broadcast(nullptr, DType::kPred, *shape);
}

// Whichever kernel the device of the call gets, the workspace suffices.
int64_t backward_workspace_of_any_kernel(int batch, int q_len, int kv_len, int q_heads,
                                         int kv_heads, int head_dim, bool deterministic,
                                         const MaskShape& mask) {
  const Problem problem{batch, q_len, kv_len, q_heads, kv_heads, head_dim, head_dim, DType::kBF16};
  const std::optional<Broadcast> strides = mask_of_shape(mask);
  return std::max(backward_workspace(problem, deterministic, strides ? &*strides : nullptr),
                  backward_sm80_workspace(batch, q_len, q_heads));
}

// ---- explain: parameters without data, from what Python says of a call

std::optional<DType> dtype_named(std::string_view text) {
  for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3,
                      DType::kS8, DType::kS32, DType::kPred}) {
    if (text == name(dtype)) return dtype;
  }
  return std::nullopt;
}

// The strides that an operand has when it is contiguous in the layout.
Strided contiguous(bool heads_first, int batch, int length, int heads, int dim) {
  Strided s;
  s.batches = batch;
  s.batch = int64_t{length} * heads * dim;
  s.seq = heads_first ? dim : int64_t{heads} * dim;
  s.head = heads_first ? int64_t{length} * dim : dim;
  return s;
}

// (kernel, reason, details) of explain.h; op is "prefill", "backward" or "decode".
nb::tuple explain(const std::string& op, nb::dict sizes, nb::dict dtypes, nb::dict shapes,
                  nb::dict options, nb::dict facts) {
  auto size = [&](const char* key) { return nb::cast<int>(sizes[key]); };
  auto fact = [&](const char* key) { return nb::cast<int>(facts[key]); };
  const Device device{0, fact("major"), fact("minor"), fact("sm_count"),
                      fact("shared_memory_per_block")};
  auto dtype = [&](const char* operand) {
    return dtype_named(nb::cast<std::string>(dtypes[operand])).value_or(DType::kF64);
  };
  const Problem problem{size("batch"),    size("q_len"),    size("kv_len"),    size("q_heads"),
                        size("kv_heads"), size("head_dim"), size("value_dim"), dtype("query")};
  const bool heads_first = nb::cast<std::string>(options["layout"]) == "BNTH";
  const Scores scores{nb::cast<double>(options["scale"]), nb::cast<double>(options["softcap"]),
                      nb::cast<int>(options["window_left"]), nb::cast<int>(options["window_right"]),
                      nb::cast<bool>(options["bottom_right"])};
  auto queries = [&](int dim) {
    return contiguous(heads_first, problem.batch, problem.q_len, problem.q_heads, dim);
  };
  auto keys = [&](int dim) {
    return contiguous(heads_first, problem.batch, problem.kv_len, problem.kv_heads, dim);
  };
  // Present operands are told from absent ones by their pointers, which nothing here follows.
  alignas(16) static char somewhere[16];
  auto given = [&](const char* operand) {
    return static_cast<void*>(dtypes.contains(operand) ? somewhere : nullptr);
  };
  Explained answer;
  if (op == "decode") {
    DecodeParams p{};
    p.problem = problem;
    p.scores = scores;
    p.cache_dtype = dtype("key_cache");
    p.q = queries(problem.head_dim), p.o = queries(problem.value_dim);
    p.k = keys(problem.head_dim);
    p.values_in_keys = !dtypes.contains("value_cache");
    p.v = p.values_in_keys ? p.k : keys(problem.value_dim);
    p.page_table.data = static_cast<int32_t*>(given("page_table"));
    p.page_size = size("page_size");
    p.num_splits = nb::cast<int>(options["num_splits"]);
    p.batch_invariant = nb::cast<bool>(options["batch_invariant"]);
    answer = explain_decode(p, device);
  } else {
    BackwardParams gradients{};
    PrefillParams& p = gradients.forward;
    p.problem = problem;
    p.scores = scores;
    p.q = queries(problem.head_dim), p.o = queries(problem.value_dim);
    p.k = keys(problem.head_dim), p.v = keys(problem.value_dim);
    p.features.alibi_slopes.data = static_cast<float*>(given("alibi_slopes"));
    if (given("bias") != nullptr) {
      const auto dims = nb::cast<std::array<int64_t, 4>>(shapes["bias"]);
      p.features.bias = contiguous_broadcast(given("bias"), dtype("bias"), dims);
    }
    p.features.mask.data = given("mask");
    p.features.query_segments.data = static_cast<int32_t*>(given("query_segment_ids"));
    p.features.sinks.data = static_cast<float*>(given("sinks"));
    gradients.dout = p.o, gradients.dq = p.q, gradients.dk = p.k, gradients.dv = p.v;
    gradients.deterministic = nb::cast<bool>(options["deterministic"]);
    answer = op == "backward" ? explain_backward(gradients, device) : explain_prefill(p, device);
  }
  return nb::make_tuple(answer.kernel, answer.reason, answer.details);
}

template <int... Dims>
std::string joined(std::integer_sequence<int, Dims...>) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + std::to_string(Dims)), ...);
  return text;
}

template <int... Dims>
constexpr int largest(std::integer_sequence<int, Dims...>) {
  return std::max({Dims...});
}

std::string build_summary() {
  return "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
         std::to_string(CUDART_VERSION % 1000 / 10) + ", head dims " + joined(GenericHeadDims{}) +
         " (Hopper kernels " + joined(HeadDims{}) + ", gradients " +
         joined(BackwardSm90HeadDims{}) + ")";
}

// ---- self-tests, on device 0's default stream; pointers are those of jax arrays

template <class Run>
void run_selftest(Run&& run) {
  Device device;
  Status status = device_facts(0, &device);
  if (status.ok()) status = run(device);
  if (status.ok()) {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) status = {cudaGetErrorString(error)};
  }
  if (!status.ok()) throw std::runtime_error(status.message);
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void define_selftests(nb::module_& m) {
  m.def("selftest_wgmma",
        [](int mode, int n, uintptr_t a, uintptr_t b, uintptr_t d, uintptr_t rounded) {
          run_selftest([&](const Device& device) {
            return selftest_wgmma(mode, n, pointer<void>(a), pointer<void>(b), pointer<float>(d),
                                  pointer<void>(rounded), device, nullptr);
          });
        });
  m.def("selftest_tma", [](uintptr_t x, uintptr_t raw, int positions, int heads, int head_dim,
                           int group, int position, int group_index) {
    run_selftest([&](const Device& device) {
      return selftest_tma(pointer<void>(x), pointer<void>(raw), positions, heads, head_dim, group,
                          position, group_index, device, nullptr);
    });
  });
  m.def("selftest_ring", [](uintptr_t x, uintptr_t sum, int tiles) {
    run_selftest([&](const Device& device) {
      return selftest_ring(pointer<void>(x), pointer<float>(sum), tiles, device, nullptr);
    });
  });
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("targets", [] {
    nb::dict targets;
    targets["prefill"] = handler_capsule(PrefillHandler);
    targets["backward"] = handler_capsule(BackwardHandler);
    targets["decode"] = handler_capsule(DecodeHandler);
    return targets;
  });
  m.def("signature", signature);
  m.def("ffi_api_version", ffi_api_version);
  m.def("build_summary", build_summary);
  m.def("explain", explain);
  m.def("limit_architecture", &limit_architecture);
  define_selftests(m);
  m.def("largest_head_dim", [] { return largest(GenericHeadDims{}); });
  m.def("prefill_workspace", [](int q_len, int kv_len, int q_heads, int head_dim,
                                const MaskShape& mask) {
    const Problem problem{1, q_len, kv_len, q_heads, q_heads, head_dim, head_dim, DType::kBF16};
    const std::optional<Broadcast> strides = mask_of_shape(mask);
    return prefill_workspace(problem, strides ? &*strides : nullptr);
  });
  m.def("decode_workspace",
        [](int batch, int q_len, int q_heads, int kv_heads, int value_dim, int num_splits) {
          return std::max<int64_t>(
              1, decode_workspace(batch, q_len, q_heads, kv_heads, value_dim, num_splits));
        });
  m.def("backward_workspace", backward_workspace_of_any_kernel);
}

}  // namespace flashattn
