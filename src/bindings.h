// What both extension modules tell Python: their custom calls, and the signature those were
// compiled with.
#ifndef FLASHATTN_BINDINGS_H_
#define FLASHATTN_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "attrs.h"
#include "make_params.h"

namespace flashattn {

namespace nb = nanobind;

template <class T>
constexpr const char* attribute_type() {
  if constexpr (std::is_same_v<T, double>) return "float64";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, std::string_view>) return "string";
}

inline nb::list buffer_names(const std::vector<BufferName>& names) {
  nb::list list;
  for (const BufferName& n : names) list.append(nb::make_tuple(n.name, n.required));
  return list;
}

template <class Attrs>
nb::dict call_signature(const std::vector<BufferName>& operands,
                        const std::vector<BufferName>& results) {
  nb::dict attributes;
  std::apply(
      [&](auto... field) {
        ((attributes[field.name] =
              attribute_type<std::decay_t<decltype(std::declval<Attrs>().*field.member)>>()),
         ...);
      },
      Attrs::fields());
  nb::dict signature;
  signature["operands"] = buffer_names(operands);
  signature["results"] = buffer_names(results);
  signature["attributes"] = attributes;
  return signature;
}

// operation -> {"operands": [(name, required)], "results": likewise, "attributes": {name: type}}
inline nb::dict signature() {
  nb::dict all;
  all["prefill"] = call_signature<PrefillAttrs>(kPrefillOperands, kPrefillResults);
  all["backward"] = call_signature<BackwardAttrs>(kBackwardOperands, kBackwardResults);
  all["decode"] = call_signature<DecodeAttrs>(kDecodeOperands, kDecodeResults);
  return all;
}

inline nb::capsule handler_capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// The FFI version these handlers were built for; a jaxlib older than it must not load them.
inline nb::tuple ffi_api_version() { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }

}  // namespace flashattn

#endif  // FLASHATTN_BINDINGS_H_
