// What every handler needs of XLA's FFI: attributes decoded by name, buffers found by name, errors
// that say what was wrong. The only header besides make_params.h and the modules that sees an XLA
// type.
#ifndef FLASHATTN_FFI_H_
#define FLASHATTN_FFI_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attrs.h"
#include "dtype.h"
#include "xla/ffi/api/ffi.h"

namespace flashattn {

namespace ffi = ::xla::ffi;

[[nodiscard]] inline ffi::Error invalid(std::string message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(message));
}

inline std::optional<DType> to_dtype(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F64:
      return DType::kF64;
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F8E4M3FN:
      return DType::kF8E4M3;
    case ffi::DataType::S8:
      return DType::kS8;
    case ffi::DataType::S32:
      return DType::kS32;
    case ffi::DataType::PRED:
      return DType::kPred;
    default:
      return std::nullopt;
  }
}

// ---- attributes

// All of `Attrs` from the dictionary; a missing, mistyped or superfluous attribute is an error.
template <class Attrs>
ffi::ErrorOr<Attrs> decode_attrs(const char* op, const ffi::Dictionary& dictionary) {
  Attrs attrs{};
  std::string problems;
  auto decode_one = [&](auto field) {
    using T = std::decay_t<decltype(attrs.*field.member)>;
    ffi::ErrorOr<T> value = dictionary.get<T>(field.name);
    if (value.has_value()) {
      attrs.*field.member = *value;
    } else {
      problems += std::string(problems.empty() ? "" : "; ") + field.name + " (" +
                  value.error().message() + ")";
    }
  };
  constexpr auto fields = Attrs::fields();
  std::apply([&](auto... field) { (decode_one(field), ...); }, fields);
  constexpr size_t expected = std::tuple_size_v<decltype(fields)>;
  if (problems.empty() && dictionary.size() != expected) {
    problems = std::to_string(dictionary.size()) + " attributes where there are " +
               std::to_string(expected);
  }
  if (!problems.empty()) {
    return ffi::Unexpected(
        invalid(std::string(op) + ": attributes do not match the native signature: " + problems));
  }
  return attrs;
}

// ---- buffers

struct BufferName {
  const char* name;
  bool required;
};

// The operands or the results of one call, by name.
class NamedBuffers {
 public:
  // `names` in the order of the buffers; each must be in `known`, and the required ones must be
  // there.
  template <class Getter>
  static ffi::ErrorOr<NamedBuffers> bind(const char* op, std::string_view names, size_t count,
                                         const std::vector<BufferName>& known, Getter&& get) {
    NamedBuffers buffers(op);
    for (size_t i = 0; !names.empty(); ++i) {
      const size_t comma = names.find(',');
      const std::string_view name = names.substr(0, comma);
      names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 1);
      bool is_known = false;
      for (const BufferName& k : known) is_known = is_known || name == k.name;
      if (!is_known || buffers.find(name) != nullptr || i >= count) {
        return ffi::Unexpected(invalid(std::string(op) + ": buffer '" + std::string(name) +
                                       "' is unknown, repeated or not passed"));
      }
      auto buffer = get(i);
      if (!buffer.has_value()) return ffi::Unexpected(std::move(buffer).error());
      buffers.entries_.push_back({name, to_any(*buffer)});
    }
    if (buffers.entries_.size() != count) {
      return ffi::Unexpected(invalid(std::string(op) + ": " + std::to_string(count) +
                                     " buffers were passed, " +
                                     std::to_string(buffers.entries_.size()) + " named"));
    }
    for (const BufferName& k : known) {
      if (k.required && buffers.find(k.name) == nullptr) {
        return ffi::Unexpected(invalid(std::string(op) + ": buffer '" + k.name + "' is missing"));
      }
    }
    return buffers;
  }

  const ffi::AnyBuffer* find(std::string_view name) const {
    for (const Entry& e : entries_) {
      if (e.name == name) return &e.buffer;
    }
    return nullptr;
  }
  const ffi::AnyBuffer& operator[](std::string_view name) const { return *find(name); }
  const char* op() const { return op_; }

 private:
  struct Entry {
    std::string_view name;
    ffi::AnyBuffer buffer;
  };
  explicit NamedBuffers(const char* op) : op_(op) { entries_.reserve(16); }
  static ffi::AnyBuffer to_any(ffi::AnyBuffer b) { return b; }
  static ffi::AnyBuffer to_any(ffi::Result<ffi::AnyBuffer> b) { return *b; }

  const char* op_;
  std::vector<Entry> entries_;
};

inline std::string shape_text(ffi::AnyBuffer::Dimensions dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

// The named buffer must have this dtype and this shape; -1 stands for any size.
[[nodiscard]] inline ffi::Error check_buffer(const NamedBuffers& buffers, const char* name,
                                             DType dtype, const std::vector<int64_t>& shape) {
  const ffi::AnyBuffer& buffer = buffers[name];
  const std::optional<DType> actual = to_dtype(buffer.element_type());
  if (actual != dtype) {
    return invalid(std::string(buffers.op()) + ": " + name + " has the wrong dtype, got " +
                   (actual ? flashattn::name(*actual) : "an unsupported one") + "; it must be " +
                   flashattn::name(dtype));
  }
  const auto dims = buffer.dimensions();
  bool ok = dims.size() == shape.size();
  std::string wanted = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    ok = ok && (shape[i] == dims[i] || (shape[i] == -1 && dims[i] >= 0));
    wanted += (i ? ", " : "") + (shape[i] == -1 ? std::string("any") : std::to_string(shape[i]));
  }
  if (!ok) {
    return invalid(std::string(buffers.op()) + ": " + name + " has the wrong shape, got " +
                   shape_text(dims) + "; it must be " + wanted + ")");
  }
  return ffi::Error::Success();
}

}  // namespace flashattn

#endif  // FLASHATTN_FFI_H_
