// What every packed boolean mask has: planes, and what is known of a part of one without its bits.
#ifndef FLASHATTN_CUDA_MASK_PLANES_H_
#define FLASHATTN_CUDA_MASK_PLANES_H_

#include <cstdint>

#include "params.h"

namespace flashattn {

// A plane is what one head of one batch sees, if it differs from others. Axes along which the mask
// does not vary have one entry.
struct MaskPlanes {
  uint32_t* words = nullptr;  // plane after plane, a bit for each pair
  uint8_t* seen = nullptr;    // plane after plane: kAny, kAll
  int batches = 1, heads = 1;

  static constexpr int kAny = 1, kAll = 2;  // some row sees a key; all rows see all keys

  MaskPlanes() = default;
  constexpr MaskPlanes(const Problem& problem, const Broadcast& mask)
      : batches(mask.batches), heads(mask.head == 0 ? 1 : problem.q_heads) {}

  constexpr int64_t planes() const { return int64_t{batches} * heads; }
  constexpr int64_t plane(int batch, int head) const {
    return int64_t{batch % batches} * heads + (heads == 1 ? 0 : head);
  }
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_MASK_PLANES_H_
