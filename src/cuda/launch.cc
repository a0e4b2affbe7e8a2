#include "launch.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "backward_plan.h"
#include "decode_latent_plan.h"
#include "instances.h"
#include "tiles_sm90.h"

namespace flashattn {
namespace {

template <int... Dims>
std::string to_text(std::integer_sequence<int, Dims...>) {
  std::string text;
  ((text += (text.empty() ? "" : ", ") + std::to_string(Dims)), ...);
  return text;
}

template <int... Dims>
constexpr int largest(std::integer_sequence<int, Dims...>) {
  return std::max({Dims...});
}

// Calls f(std::integral_constant<int, D>) with the smallest D of the list that is at least
// `wanted`.
template <int... Dims, class F>
Status with_head_dim(std::integer_sequence<int, Dims...> dims, int wanted, F&& f) {
  Status status{"head dim " + std::to_string(wanted) + " is above every compiled one (" +
                to_text(dims) + ")"};
  bool found = false;
  auto attempt = [&](auto dim) {
    if (!found && wanted <= dim()) {
      found = true;
      status = f(dim);
    }
  };
  (attempt(std::integral_constant<int, Dims>{}), ...);
  return status;
}

template <class T>
constexpr DType dtype_of = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;

// Calls f(T{}) with the compiled element type that is `dtype`.
template <class... Ts, class F>
Status with_dtype(Types<Ts...>, DType dtype, F&& f) {
  Status status{std::string("no kernel is compiled for ") + name(dtype)};
  auto attempt = [&](auto element) {
    if (dtype_of<decltype(element)> == dtype) status = f(element);
  };
  (attempt(Ts{}), ...);
  return status;
}

template <class Dims, class F>
Status with_kernel(const Problem& problem, Dims dims, F&& f) {
  return with_dtype(DTypes{}, problem.dtype, [&](auto element) {
    return with_head_dim(dims, problem.widest_dim(), [&](auto dim) { return f(element, dim); });
  });
}

// What no kernel does, or empty.
std::string unsupported(const Problem& problem, const Device& device) {
  if (device.major < 8) return "the GPU is older than compute capability 8.0";
  if (problem.dtype != DType::kF16 && problem.dtype != DType::kBF16) {
    return std::string("no CUDA kernel takes ") + name(problem.dtype);
  }
  if (problem.widest_dim() > largest(GenericHeadDims{})) {
    return "the head dim is above every compiled one (" + to_text(GenericHeadDims{}) + ")";
  }
  if (problem.head_dim % 8 != 0 || problem.value_dim % 8 != 0) {
    return "the head dims are not multiples of 8";
  }
  return "";
}

template <class Params>
Choice choose(const Params& params, const Problem& problem, const Device& device,
              bool (*sm90_supports)(const Params&, const char**)) {
  if (std::string problem_text = unsupported(problem, device); !problem_text.empty()) {
    return {Choice::kNone, problem_text};
  }
  const char* reason = "";
  if (device.major != 9) return {Choice::kSm80, ""};
  if (sm90_supports(params, &reason)) return {Choice::kSm90, ""};
  return {Choice::kSm80, reason};
}

Status launch_generic_backward(const BackwardParams& params, const Device& device,
                               cudaStream_t stream) {
  return with_kernel(params.forward.problem, GenericHeadDims{}, [&](auto element, auto dim) {
    return launch_backward_sm80<decltype(element), dim()>(params, device, stream);
  });
}

}  // namespace

Choice choose_prefill(const PrefillParams& params, const Device& device) {
  return choose(params, params.problem, device, prefill_sm90_supports);
}

Choice choose_backward(const BackwardParams& params, const Device& device) {
  return choose(params, params.forward.problem, device, backward_sm90_supports);
}

Choice choose_decode(const DecodeParams& params, const Device& device) {
  const Problem& problem = params.problem;
  if (std::string text = unsupported(problem, device); !text.empty()) return {Choice::kNone, text};
  if (device.major != 9 || problem.head_dim != kLatentHeadDim) return {Choice::kSm80, ""};
  const char* refusal = latent_refusal(params);
  return refusal == nullptr ? Choice{Choice::kSm90, ""} : Choice{Choice::kSm80, refusal};
}

Status launch_prefill(const PrefillParams& params, const Device& device, cudaStream_t stream) {
  const Choice choice = choose_prefill(params, device);
  if (choice.path == Choice::kNone) return {choice.reason};
  if (choice.path == Choice::kSm90) {
    return with_kernel(params.problem, HeadDims{}, [&](auto element, auto dim) {
      return launch_prefill_sm90<decltype(element), dim()>(params, device, stream);
    });
  }
  return with_kernel(params.problem, GenericHeadDims{}, [&](auto element, auto dim) {
    return launch_prefill_sm80<decltype(element), dim()>(params, device, stream);
  });
}

Status launch_backward(const BackwardParams& params, const Device& device, cudaStream_t stream) {
  const Choice choice = choose_backward(params, device);
  if (choice.path == Choice::kNone) return {choice.reason};
  if (choice.path == Choice::kSm90) {
    const Status status =
        with_kernel(params.forward.problem, BackwardSm90HeadDims{}, [&](auto element, auto dim) {
          return launch_backward_sm90<decltype(element), dim()>(params, device, stream);
        });
    if (!status.ok() || !backward_may_be_done_again(params.forward)) return status;
    BackwardParams again = params;
    again.only_if = BackwardWorkspace(params).again;
    again.dsinks = nullptr;  // no product is in it
    return launch_generic_backward(again, device, stream);
  }
  return launch_generic_backward(params, device, stream);
}

Status launch_decode(const DecodeParams& params, const Device& device, cudaStream_t stream) {
  const Choice choice = choose_decode(params, device);
  if (choice.path == Choice::kNone) return {choice.reason};
  if (choice.path == Choice::kSm90) {
    return with_dtype(DTypes{}, params.problem.dtype, [&](auto element) {
      return launch_decode_latent_sm90<decltype(element), kLatentHeadDim>(params, device, stream);
    });
  }
  return with_kernel(params.problem, GenericHeadDims{}, [&](auto element, auto dim) {
    return launch_decode<decltype(element), dim()>(params, device, stream);
  });
}

}  // namespace flashattn
