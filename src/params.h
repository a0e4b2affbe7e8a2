// What a kernel is asked to do: plain structures that every kernel, CPU and CUDA, takes. No XLA
// type appears here; make_params.h fills these from FFI buffers and checks all that memory safety
// needs.
//
// Letters as in jax.nn: B batch, T query length, S key length, N query heads, K key/value heads,
// H head dim of queries and keys, V head dim of values.
#ifndef FLASHATTN_PARAMS_H_
#define FLASHATTN_PARAMS_H_

#include <cstdint>
#include <limits>

#include "dtype.h"

namespace flashattn {

constexpr int kUnlimited = std::numeric_limits<int32_t>::max();

constexpr int min_int(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }
constexpr int max_int(int64_t a, int64_t b) { return static_cast<int>(a > b ? a : b); }

// A (batch, length, heads, head dim) operand in either layout: the head dim is contiguous, strides
// count elements. vmap folds mapped axes in front of the batch, so an operand that was not mapped
// has fewer batches than the call and is read again: entry b of the call reads b % batches.
struct Strided {
  void* data = nullptr;
  int batches = 1;
  int64_t batch = 0, seq = 0, head = 0;

  constexpr int64_t offset(int b, int64_t t, int n) const {
    return (b % batches) * batch + t * seq + n * head;
  }
};

// lse and the like: one number a query row. data is float32, float64 when the call's dtype is; null
// when nobody asks for it.
struct Rows {
  void* data = nullptr;
  int64_t batch = 0, seq = 0, head = 0;

  constexpr int64_t offset(int b, int64_t t, int n) const { return b * batch + t * seq + n * head; }
};

// An operand that broadcasts over any of (B, N, T, S): stride 0 where it does.
struct Broadcast {
  const void* data = nullptr;
  DType dtype = DType::kPred;
  int batches = 1;
  int64_t batch = 0, head = 0, row = 0, col = 0;

  constexpr int64_t offset(int b, int n, int64_t t, int64_t s) const {
    return (b % batches) * batch + n * head + t * row + s * col;
  }
};

// A contiguous (batches, width) operand: lengths (width 1), segment ids (width T or S), sinks (N),
// ...
template <class T>
struct Table {
  T* data = nullptr;
  int batches = 1;
  int64_t width = 1;

  constexpr explicit operator bool() const { return data != nullptr; }
  constexpr T* row(int b) const { return data + (b % batches) * width; }
};

struct Problem {
  int batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim;
  DType dtype;

  constexpr int group() const { return q_heads / kv_heads; }
  // What a kernel has to be compiled for.
  constexpr int widest_dim() const { return head_dim > value_dim ? head_dim : value_dim; }
};

// Query i sees key j iff i + shift - window_left <= j <= i + shift + window_right, both lengths
// permitting; shift is kv_len - q_len of the sequence (bottom right) or 0 (top left). Causal is
// window_right == 0.
struct Scores {
  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  int window_left = kUnlimited, window_right = kUnlimited;
  bool bottom_right = true;
};

struct KeyRange {
  int begin, end;  // begin >= end: no key
};

// The keys that the window and the length leave to query row i of a sequence with these lengths.
constexpr KeyRange visible_keys(const Scores& scores, int i, int q_len, int kv_len) {
  const int64_t center = int64_t{i} + (scores.bottom_right ? kv_len - q_len : 0);
  return {scores.window_left == kUnlimited ? 0 : max_int(0, center - scores.window_left),
          scores.window_right == kUnlimited ? kv_len
                                            : min_int(kv_len, center + scores.window_right + 1)};
}

constexpr int clamp_length(int length, int capacity) {
  return length < 0 ? 0 : (length > capacity ? capacity : length);
}

// The score features that need an operand; absent ones are null. They apply after the soft cap, in
// this order: ALiBi, bias, then the masks. A sink is one more logit a head that has no value.
struct Features {
  Table<const float> alibi_slopes;      // (b, N): -slope * |i + shift - j|
  Broadcast bias;                       // any float dtype
  Broadcast mask;                       // bool, true: visible
  Table<const int32_t> query_segments;  // (b, T): a query sees the keys of its own segment
  Table<const int32_t> key_segments;    // (b, S)
  Table<const float> sinks;             // (b, N)

  constexpr bool any_mask_or_bias() const {
    return alibi_slopes.data || bias.data || mask.data || query_segments.data;
  }
};

struct PrefillParams {
  Problem problem;
  Scores scores;
  Features features;
  Table<const int32_t> query_lengths, key_lengths;  // (b, 1) or null: T and S; clamped on read
  Strided q, k, v, o;
  Rows lse;
  void* workspace = nullptr;   // CUDA: uninitialised; prefill_workspace() says how much
  int64_t workspace_size = 0;  // in bytes

  constexpr int q_length(int b) const {
    return query_lengths ? clamp_length(*query_lengths.row(b), problem.q_len) : problem.q_len;
  }
  constexpr int kv_length(int b) const {
    return key_lengths ? clamp_length(*key_lengths.row(b), problem.kv_len) : problem.kv_len;
  }
};

// Gradients of one prefill. o, lse, dout and dlse have the call's full batch; so have dq, dk, dv
// (the caller sums over repeated batches). dq, dk, dv are in the problem's dtype; dbias and dsinks
// fp32.
struct BackwardParams {
  PrefillParams forward;  // q, k, v, o, lse and everything that shapes the scores
  Strided dout, dq, dk, dv;
  Rows dlse;
  float* dsinks = nullptr;  // (B, N), when the forward call had sinks
  float* dbias = nullptr;   // (B, N, T, S), when its gradient is asked for
  bool deterministic = false;
  float* workspace = nullptr;  // CUDA: uninitialised; backward_workspace() says how much
  int64_t workspace_size = 0;  // in floats
  // CUDA: a number on the device; while it is 0 the kernels return at once. Null: they do not.
  const float* only_if = nullptr;
};

// One or a few new tokens a sequence over a KV cache. The T queries are the last T positions of the
// sequence, causal among themselves: query i sees keys j <= length - T + i.
struct DecodeParams {
  Problem problem;  // kv_len: a sequence's capacity (paged: max_pages * page_size)
  Scores scores;    // bottom right, window_right 0
  DType cache_dtype;
  Strided q, o;
  Strided k, v;  // paged: `batch` is the stride of a page, `seq` of a token inside it
  bool values_in_keys = false;  // v is k: the values are the keys' first value_dim dimensions
  Rows lse;
  Table<const int32_t> seq_lens;  // (b, 1), clamped on read to [0, kv_len]
  Table<const int32_t>
      page_table;  // (b, max_pages), null: contiguous. Ids outside [0, num_pages): no keys
  int page_size = 0, num_pages = 0;
  // Dequantisation of 8-bit caches, null otherwise: (1, K), or (num_pages, K) when scales go by
  // page.
  Table<const float> key_scale, value_scale;
  Table<const float> sinks;  // (b, N)
  int num_splits = 0;        // 0: chosen at launch
  bool batch_invariant = false;
  float* workspace = nullptr;  // CUDA: uninitialised; decode_workspace() says how much
  int64_t workspace_size = 0;  // in floats

  constexpr int length(int b) const { return clamp_length(*seq_lens.row(b), problem.kv_len); }
};

}  // namespace flashattn

#endif  // FLASHATTN_PARAMS_H_
