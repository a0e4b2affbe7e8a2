// The module `_cuda`: the custom calls for XLA's CUDA backend. It loads where there is no GPU and no
// driver: the runtime is linked statically, and nothing is called before a kernel is.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "../bindings.h"
#include "../ffi.h"
#include "../make_params.h"
#include "backward_plan.h"
#include "backward_sm80_plan.h"
#include "decode_plan.h"
#include "device.h"
#include "launch.h"

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
  return handle<PrefillAttrs>(
      "prefill", stream, ordinal, args, rets, attrs, kPrefillOperands, kPrefillResults,
      make_prefill_params, [](const PrefillParams& params, const Device& device, cudaStream_t s) {
        return launch_prefill(params, device, s);
      });
}
ffi::Error backward(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle<BackwardAttrs>(
      "backward", stream, ordinal, args, rets, attrs, kBackwardOperands, kBackwardResults,
      make_backward_params, [](const BackwardParams& params, const Device& device, cudaStream_t s) {
        return launch_backward(params, device, s);
      });
}
ffi::Error decode(cudaStream_t stream, int32_t ordinal, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return handle<DecodeAttrs>(
      "decode", stream, ordinal, args, rets, attrs, kDecodeOperands, kDecodeResults,
      make_decode_params, [](const DecodeParams& params, const Device& device, cudaStream_t s) {
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
// Capturable in a CUDA graph: no allocation, no synchronisation, no read of device memory by the host.
XLA_FFI_DEFINE_HANDLER_SYMBOL(PrefillHandler, prefill, binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardHandler, backward, binding(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeHandler, decode, binding(),
                              {ffi::Traits::kCmdBufferCompatible});

// Whichever kernel the device of the call gets, the workspace suffices.
int64_t backward_workspace_of_any_kernel(int batch, int q_len, int kv_len, int q_heads,
                                         int kv_heads, int head_dim) {
  const Problem problem{batch,    q_len,    kv_len,   q_heads,
                        kv_heads, head_dim, head_dim, DType::kBF16};
  return std::max(backward_workspace(problem, false),
                  backward_sm80_workspace(batch, q_len, q_heads));
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
  m.def("cuda_version", [] { return CUDART_VERSION; });
  m.def("decode_workspace", [](int batch, int q_len, int q_heads, int kv_heads, int value_dim,
                               int num_splits) {
    return std::max<int64_t>(
        1, decode_workspace(batch, q_len, q_heads, kv_heads, value_dim, num_splits));
  });
  m.def("backward_workspace", backward_workspace_of_any_kernel);
}

}  // namespace flashattn
