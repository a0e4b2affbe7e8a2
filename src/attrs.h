// The attributes of every custom call: each struct's fields() is the single list of them. C++
// decodes by it, Python reads it through signature() and casts by it, so the two sides cannot drift
// apart.
#ifndef FLASHATTN_ATTRS_H_
#define FLASHATTN_ATTRS_H_

#include <cstdint>
#include <string_view>
#include <tuple>

namespace flashattn {

template <class Struct, class T>
struct Field {
  const char* name;
  T Struct::* member;
};
template <class Struct, class T>
Field(const char*, T Struct::*) -> Field<Struct, T>;

// The buffers of a call are named, comma separated, in the order in which they are passed: optional
// ones may be left out, and none can be taken for another.
struct CallAttrs {
  std::string_view operands, results;
  std::string_view layout;  // "BTNH" or "BNTH"
  double scale, softcap;    // softcap 0: none
  int32_t window_left;      // kUnlimited: no limit

  static constexpr auto fields() {
    return std::tuple{
        Field{"operands", &CallAttrs::operands}, Field{"results", &CallAttrs::results},
        Field{"layout", &CallAttrs::layout},     Field{"scale", &CallAttrs::scale},
        Field{"softcap", &CallAttrs::softcap},   Field{"window_left", &CallAttrs::window_left}};
  }
};

struct PrefillAttrs : CallAttrs {
  int32_t window_right;  // 0: causal
  bool bottom_right;     // the windows' alignment when T != S; else top left

  static constexpr auto fields() {
    return std::tuple_cat(CallAttrs::fields(),
                          std::tuple{Field{"window_right", &PrefillAttrs::window_right},
                                     Field{"bottom_right", &PrefillAttrs::bottom_right}});
  }
};

struct BackwardAttrs : PrefillAttrs {
  bool deterministic;

  static constexpr auto fields() {
    return std::tuple_cat(PrefillAttrs::fields(),
                          std::tuple{Field{"deterministic", &BackwardAttrs::deterministic}});
  }
};

struct DecodeAttrs : CallAttrs {
  int32_t num_splits;  // 0: chosen at launch
  bool batch_invariant;

  static constexpr auto fields() {
    return std::tuple_cat(CallAttrs::fields(),
                          std::tuple{Field{"num_splits", &DecodeAttrs::num_splits},
                                     Field{"batch_invariant", &DecodeAttrs::batch_invariant}});
  }
};

}  // namespace flashattn

#endif  // FLASHATTN_ATTRS_H_
