// Vectors of one instruction set, and the elementary functions on them.
//
// Everything in the kernels is a template over Simd<Isa, Real>, so that each instruction set has
// its own symbols: code compiled for AVX-512 can never be taken for the whole module by the linker.
// For the same reason the kernels use no standard library template.
#ifndef FLASHATTN_CPU_VECTOR_H_
#define FLASHATTN_CPU_VECTOR_H_

#include <cstdint>

namespace flashattn::cpu {

// The register block of a matrix product is kBlockRows x kBlockVectors accumulators: as many as
// leave room in the register file for one row of operands.
struct Generic {
  static constexpr int kVectorBytes = 16, kBlockRows = 4, kBlockVectors = 2;
};
struct Avx2 {
  static constexpr int kVectorBytes = 32, kBlockRows = 6, kBlockVectors = 2;
};
struct Avx512 {
  static constexpr int kVectorBytes = 64, kBlockRows = 6, kBlockVectors = 4;
};

// 2^r - 1 = r * (c[0] + c[1] r + ...) for r in [-0.5, 0.5]; kRound added to a number and taken away
// again rounds it to an integer, whose low bits are meanwhile those of the sum.
template <class Real>
struct Exponential;

template <>
struct Exponential<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr Int kBias = 127;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kSmallest = -87.33f;   // below: exp is no longer a normal number
  static constexpr float kCoefficients[] = {    // minimax, relative error 1.1e-8
                                            0.6931471879266918f,    0.24022649794962958f,
                                            0.05550357433636596f,   0.009618237494305763f,
                                            0.0013390735477534878f, 0.00015403512578283303f};
};

template <>
struct Exponential<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr Int kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kSmallest = -708.39;
  static constexpr double kCoefficients[] = {
      // ln(2)^k / k!
      0.69314718055994530942,    0.24022650695910071233,    0.055504108664821579953,
      0.009618129107628477162,   0.0013333558146428443423,  0.00015403530393381609954,
      0.00001525273380405984028, 1.3215486790144309488e-6,  1.0178086009239699727e-7,
      7.0549116208011233299e-9,  4.4455382718708114976e-10, 2.5678435993488205142e-11,
      1.3691488853904128881e-12};
};

template <class IsaType, class RealType>
struct Simd {
  using Isa = IsaType;
  using Real = RealType;
  using Exp = Exponential<Real>;
  using Int = typename Exp::Int;
  template <int Bytes>
  struct Bits {
    typedef Real Vec __attribute__((vector_size(Bytes)));
    typedef Int IntVec __attribute__((vector_size(Bytes)));
  };
  using Vec = typename Bits<Isa::kVectorBytes>::Vec;
  using IntVec = typename Bits<Isa::kVectorBytes>::IntVec;

  static constexpr int kLanes = Isa::kVectorBytes / sizeof(Real);
  // Query rows of a row block: the width of a register block.
  static constexpr int kBlock = kLanes * Isa::kBlockVectors;
  static constexpr Real kInfinity = __builtin_huge_valf();

  static constexpr int whole_vectors(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

  static Vec load(const Real* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(Real* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

  static Vec broadcast(Real x) { return x - Vec{}; }

  // The second operand where either is NaN.
  static Vec max(Vec a, Vec b) { return a > b ? a : b; }

  static Vec abs(Vec x) { return x < 0 ? -x : x; }

  // The sum of all lanes, by halves as long as a half is a vector.
  template <int Bytes = Isa::kVectorBytes>
  static Real sum(typename Bits<Bytes>::Vec v) {
    if constexpr (Bytes > 16) {
      typename Bits<Bytes / 2>::Vec halves[2];
      __builtin_memcpy(halves, &v, Bytes);
      return sum<Bytes / 2>(halves[0] + halves[1]);
    } else if constexpr (sizeof(Real) == 4) {
      return (v[0] + v[1]) + (v[2] + v[3]);
    } else {
      return v[0] + v[1];
    }
  }

  // 2^r - 1 for r in [-0.5, 0.5].
  static Vec exp2_minus_1(Vec r) {
    constexpr int n = sizeof(Exp::kCoefficients) / sizeof(Real);
    Vec q = broadcast(Exp::kCoefficients[n - 1]);
#pragma GCC unroll 16
    for (int i = n - 2; i >= 0; --i) q = q * r + Exp::kCoefficients[i];
    return q * r;
  }

  // exp(x) for x up to about 80. -infinity gives 0, NaN stays NaN, results that are not normal are
  // 0.
  static Vec exp(Vec x) {
    const Vec rounded = x * kLog2E + Exp::kRound;
    const Vec r = x * kLog2E - (rounded - Exp::kRound);
    const IntVec exponent =
        ((IntVec)rounded << Exp::kMantissaBits) + (Exp::kBias << Exp::kMantissaBits);
    const Vec result = (exp2_minus_1(r) + 1) * (Vec)exponent;
    return x < Exp::kSmallest ? Vec{} : result;
  }

  // tanh|x| = (1 - e) / (1 + e), e = exp(-2|x|); near 0 the polynomial gives e - 1 without
  // cancellation.
  static Vec tanh(Vec x) {
    const Vec y = -2 * abs(x);
    const Vec r = y * kLog2E;
    const Vec minus_1 = r >= Real(-0.5) ? exp2_minus_1(r) : exp(y) - 1;
    const Vec result = -minus_1 / (minus_1 + 2);
    return x < 0 ? -result : result;
  }

 private:
  static constexpr Real kLog2E = Real(1.44269504088896340736);
};

}  // namespace flashattn::cpu

#endif  // FLASHATTN_CPU_VECTOR_H_
