#include <utility>

#include "selftest.h"
#include "selftest_sm90.cuh"

namespace flashattn {
namespace {

using Element = __nv_bfloat16;
constexpr int kWgmmaModes = 6;

template <int N, int... Modes>
Status run_mode(std::integer_sequence<int, Modes...>, int mode, const Element* a, const Element* b,
                float* d, Element* rounded, const Device& device, cudaStream_t stream) {
  Status status{"selftest: there is no such mode"};
  ((Modes == mode ? void(status = selftest_wgmma<Element, static_cast<WgmmaMode>(Modes), N>(
                             a, b, d, rounded, device, stream))
                  : void()),
   ...);
  return status;
}

template <int... Ns>
Status run_width(std::integer_sequence<int, Ns...>, int n, int mode, const Element* a,
                 const Element* b, float* d, Element* rounded, const Device& device,
                 cudaStream_t stream) {
  Status status{"selftest: there is no such width"};
  ((Ns == n ? void(status = run_mode<Ns>(std::make_integer_sequence<int, kWgmmaModes>{}, mode, a, b,
                                         d, rounded, device, stream))
            : void()),
   ...);
  return status;
}

}  // namespace

Status selftest_wgmma(int mode, int n, const void* a, const void* b, float* d, void* rounded,
                      const Device& device, cudaStream_t stream) {
  return run_width(std::integer_sequence<int, 64, 96, 128>{}, n, mode,
                   static_cast<const Element*>(a), static_cast<const Element*>(b), d,
                   static_cast<Element*>(rounded), device, stream);
}

Status selftest_tma(const void* x, void* raw, int positions, int heads, int head_dim, int group,
                    int position, int group_index, const Device& device, cudaStream_t stream) {
  return selftest_tma(static_cast<const Element*>(x), static_cast<Element*>(raw), positions, heads,
                      head_dim, group, position, group_index, device, stream);
}

Status selftest_ring(const void* x, float* sum, int tiles, const Device& device,
                     cudaStream_t stream) {
  return selftest_ring(static_cast<const Element*>(x), sum, tiles, device, stream);
}

}  // namespace flashattn
