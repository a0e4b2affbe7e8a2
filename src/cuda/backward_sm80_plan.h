// What the host must know of the generic backward: its workspace. No CUDA here.
#ifndef FLASHATTN_CUDA_BACKWARD_SM80_PLAN_H_
#define FLASHATTN_CUDA_BACKWARD_SM80_PLAN_H_

#include <cstdint>

namespace flashattn {

// Query rows are padded to this in the workspace, so that every tile of rows is there to be read.
constexpr int kBackwardRowPadding = 128;

constexpr int64_t backward_sm80_rows(int q_len) {
  return (int64_t{q_len} + kBackwardRowPadding - 1) / kBackwardRowPadding * kBackwardRowPadding;
}

// Floats: two numbers a query row.
constexpr int64_t backward_sm80_workspace(int batch, int q_len, int q_heads) {
  return 2 * int64_t{batch} * q_heads * backward_sm80_rows(q_len);
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_BACKWARD_SM80_PLAN_H_
