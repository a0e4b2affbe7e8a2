// The matrix product that all kernels are made of: C[m][x] = sum over k of A[k][m] * B[k][x].
//
// The vectors run along x. A is read one number at a time through two strides, so it may be any
// matrix or its transpose; B and C have contiguous rows of whole vectors.
#ifndef FLASHATTN_CPU_MATMUL_H_
#define FLASHATTN_CPU_MATMUL_H_

#include <cstdint>

#include "cpu/vector.h"
#include "params.h"

namespace flashattn::cpu {

template <class Real>
struct Matrix {
  const Real* data;
  int64_t k, m;  // strides
};

template <class Real>
struct Result {
  enum Update {
    kSet,
    kAdd,
    kRescaleColumns,  // C[m][x] = factor[x] * C[m][x] + ...
    kRescaleRows      // C[m][x] = factor[m] * C[m][x] + ...
  };

  Real* data;
  int stride;
  Update update = kSet;
  const Real* factor = nullptr;

  Result at(int m, int x) const {
    const int skipped = update == kRescaleColumns ? x : (update == kRescaleRows ? m : 0);
    return {data + int64_t{m} * stride + x, stride, update, factor + skipped};
  }
};

template <class V>
void update_vector(const Result<typename V::Real>& c, int m, int x, typename V::Vec sum) {
  typename V::Real* target = c.data + int64_t{m} * c.stride + x;
  if (c.update == c.kAdd) sum = V::load(target) + sum;
  if (c.update == c.kRescaleColumns) sum = V::load(target) * V::load(c.factor + x) + sum;
  if (c.update == c.kRescaleRows) sum = V::load(target) * V::broadcast(c.factor[m]) + sum;
  V::store(target, sum);
}

// Depth summed in one go. The rounding error of a sum grows with its partial sums: short sums,
// added up, keep that of a long head dim near that of a short one.
constexpr int kPanel = 32;

// Rows x Vectors accumulators stay in registers over a panel.
template <class V, int Rows, int Vectors>
void multiply_panel(Matrix<typename V::Real> a, const typename V::Real* b, int b_stride, int depth,
                    const Result<typename V::Real>& c) {
  using Vec = typename V::Vec;
  Vec sums[Rows][Vectors] = {};
  const typename V::Real* a_k = a.data;
  for (int k = 0; k < depth; ++k, a_k += a.k, b += b_stride) {
    Vec b_k[Vectors];
#pragma GCC unroll 8
    for (int x = 0; x < Vectors; ++x) b_k[x] = V::load(b + x * V::kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec a_km = V::broadcast(a_k[m * a.m]);
#pragma GCC unroll 8
      for (int x = 0; x < Vectors; ++x) sums[m][x] += a_km * b_k[x];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 8
    for (int x = 0; x < Vectors; ++x) update_vector<V>(c, m, x * V::kLanes, sums[m][x]);
  }
}

template <class V, int Rows, int Vectors>
void multiply_block(Matrix<typename V::Real> a, const typename V::Real* b, int b_stride, int depth,
                    Result<typename V::Real> c) {
  multiply_panel<V, Rows, Vectors>(a, b, b_stride, min_int(depth, kPanel), c);
  c.update = c.kAdd;
  for (int k = kPanel; k < depth; k += kPanel) {
    multiply_panel<V, Rows, Vectors>({a.data + k * a.k, a.k, a.m}, b + int64_t{k} * b_stride,
                                     b_stride, min_int(depth - k, kPanel), c);
  }
}

// The rows from `row` on in blocks of Rows, what is left in smaller ones.
template <class V, int Rows, int Vectors>
void multiply_rows(Matrix<typename V::Real> a, const typename V::Real* b, int b_stride, int depth,
                   int row, int rows, const Result<typename V::Real>& c) {
  for (; row + Rows <= rows; row += Rows) {
    multiply_block<V, Rows, Vectors>({a.data + row * a.m, a.k, a.m}, b, b_stride, depth,
                                     c.at(row, 0));
  }
  if constexpr (Rows > 1) {
    constexpr int kFewer = Rows > 4 ? 4 : Rows / 2;
    multiply_rows<V, kFewer, Vectors>(a, b, b_stride, depth, row, rows, c);
  }
}

template <class V, int Vectors>
void multiply_columns(const Matrix<typename V::Real>& a, const typename V::Real* b, int b_stride,
                      int depth, int rows, int column, int columns,
                      const Result<typename V::Real>& c) {
  constexpr int kWidth = Vectors * V::kLanes;
  for (; column + kWidth <= columns; column += kWidth) {
    multiply_rows<V, V::Isa::kBlockRows, Vectors>(a, b + column, b_stride, depth, 0, rows,
                                                  c.at(0, column));
  }
  if constexpr (Vectors > 1) {
    multiply_columns<V, Vectors / 2>(a, b, b_stride, depth, rows, column, columns, c);
  }
}

template <class V>
void multiply(const Matrix<typename V::Real>& a, const typename V::Real* b, int b_stride, int depth,
              int rows, int columns, const Result<typename V::Real>& c) {
  multiply_columns<V, V::Isa::kBlockVectors>(a, b, b_stride, depth, rows, 0, columns, c);
}

enum class Weights { kA, kB };

// The same product where the operand that is not the weights holds a NaN or an infinity: a weight
// of zero, which is what a masked position has, must not meet it.
template <class V>
void multiply_guarded(Weights weights, const Matrix<typename V::Real>& a, const typename V::Real* b,
                      int b_stride, int depth, int rows, int columns,
                      const Result<typename V::Real>& c) {
  using Vec = typename V::Vec;
  for (int m = 0; m < rows; ++m) {
    for (int x = 0; x < columns; x += V::kLanes) {
      Result<typename V::Real> panel = c;
      for (int first = 0; first < depth; first += kPanel, panel.update = panel.kAdd) {
        Vec sum = {};
        for (int k = first; k < min_int(first + kPanel, depth); ++k) {
          const Vec a_km = V::broadcast(a.data[k * a.k + m * a.m]);
          const Vec b_kx = V::load(b + int64_t{k} * b_stride + x);
          const Vec product = a_km * b_kx;
          sum += (weights == Weights::kA ? a_km : b_kx) == 0 ? Vec{} : product;
        }
        update_vector<V>(panel, m, x, sum);
      }
    }
  }
}

// The product of weights and rows of an operand that may hold a NaN or an infinity.
template <class V>
void multiply_weighted(bool finite, Weights weights, const Matrix<typename V::Real>& a,
                       const typename V::Real* b, int b_stride, int depth, int rows, int columns,
                       const Result<typename V::Real>& c) {
  if (finite) {
    multiply<V>(a, b, b_stride, depth, rows, columns, c);
  } else {
    multiply_guarded<V>(weights, a, b, b_stride, depth, rows, columns, c);
  }
}

// C[m][x] = A[m] . B[x] for a few rows of B, the vectors along the rows: where there are too few
// columns to fill vectors with. A, B and C have rows of whole vectors; those of A and B end in
// zeros.
template <class V, int Columns>
void dot_columns(const typename V::Real* a, int a_stride, const typename V::Real* b, int b_stride,
                 int depth, int rows, int column, int columns, typename V::Real* c, int c_stride) {
  for (; column + Columns <= columns; column += Columns) {
    const typename V::Real* b_x = b + int64_t{column} * b_stride;
    for (int m = 0; m < rows; ++m) {
      typename V::Vec sums[Columns] = {};
      for (int k = 0; k < depth; k += V::kLanes) {
        const typename V::Vec a_mk = V::load(a + int64_t{m} * a_stride + k);
#pragma GCC unroll 8
        for (int x = 0; x < Columns; ++x) sums[x] += a_mk * V::load(b_x + x * b_stride + k);
      }
#pragma GCC unroll 8
      for (int x = 0; x < Columns; ++x) c[m * c_stride + column + x] = V::sum(sums[x]);
    }
  }
  if constexpr (Columns > 1) {
    dot_columns<V, Columns / 2>(a, a_stride, b, b_stride, depth, rows, column, columns, c,
                                c_stride);
  }
}

template <class V>
void multiply_few(const typename V::Real* a, int a_stride, const typename V::Real* b, int b_stride,
                  int depth, int rows, int columns, typename V::Real* c, int c_stride) {
  dot_columns<V, 4>(a, a_stride, b, b_stride, depth, rows, 0, columns, c, c_stride);
  for (int m = 0; m < rows; ++m) {
    for (int x = columns; x < V::whole_vectors(columns); ++x) c[m * c_stride + x] = 0;
  }
}

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_MATMUL_H_
