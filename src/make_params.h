// From the FFI's buffers and attributes to the kernels' parameters, with every check that memory
// safety needs; shared by the CPU and the CUDA module.
#ifndef FLASHATTN_MAKE_PARAMS_H_
#define FLASHATTN_MAKE_PARAMS_H_

#include <initializer_list>
#include <string>
#include <vector>

#include "attrs.h"
#include "ffi.h"
#include "params.h"

namespace flashattn {

// ---- the buffers of each operation: the one list, exported to Python by signature()

inline const std::vector<BufferName> kPrefillOperands = {{"query", true},
                                                         {"key", true},
                                                         {"value", true},
                                                         {"query_seq_lengths", false},
                                                         {"key_value_seq_lengths", false},
                                                         {"alibi_slopes", false},
                                                         {"bias", false},
                                                         {"mask", false},
                                                         {"query_segment_ids", false},
                                                         {"key_value_segment_ids", false},
                                                         {"sinks", false}};
inline const std::vector<BufferName> kPrefillResults = {
    {"out", true}, {"lse", false}, {"workspace", false}};

inline const std::vector<BufferName> kBackwardOperands = [] {
  std::vector<BufferName> names = kPrefillOperands;
  for (const char* name : {"out", "lse", "dout"}) names.push_back({name, true});
  names.push_back({"dlse", false});  // absent: zero
  return names;
}();
inline const std::vector<BufferName> kBackwardResults = {{"dquery", true}, {"dkey", true},
                                                         {"dvalue", true}, {"dsinks", false},
                                                         {"dbias", false}, {"workspace", false}};

inline const std::vector<BufferName> kDecodeOperands = {
    {"query", true},       {"key_cache", true},  {"value_cache", false}, {"seq_lens", true},
    {"page_table", false}, {"key_scale", false}, {"value_scale", false}, {"sinks", false}};
inline const std::vector<BufferName> kDecodeResults = {
    {"out", true}, {"lse", true}, {"workspace", false}};

// ---- layouts

// Where batch, length and heads stand among a rank-4 operand's axes; the head dim is always last.
struct Layout {
  int seq, head;

  // (B, length, heads, width) in this layout's order
  std::vector<int64_t> shape(int64_t b, int64_t seq_size, int64_t head_size, int64_t width) const {
    std::vector<int64_t> dims(4);
    dims[0] = b, dims[seq] = seq_size, dims[head] = head_size, dims[3] = width;
    return dims;
  }
  std::vector<int64_t> row_shape(int64_t b, int64_t seq_size, int64_t head_size) const {
    std::vector<int64_t> dims = shape(b, seq_size, head_size, 0);
    dims.pop_back();
    return dims;
  }
  Strided strided(const ffi::AnyBuffer& buffer) const {
    const auto dims = buffer.dimensions();
    const int64_t inner = dims[2] * dims[3];
    Strided s;
    s.data = buffer.untyped_data();
    s.batches = static_cast<int>(dims[0]);
    s.batch = dims[1] * inner;
    (seq == 1 ? s.seq : s.head) = inner;
    (seq == 1 ? s.head : s.seq) = dims[3];
    return s;
  }
  Rows rows(const ffi::AnyBuffer& buffer) const {
    const auto dims = buffer.dimensions();
    Rows r;
    r.data = buffer.untyped_data();
    r.batch = dims[1] * dims[2];
    (seq == 1 ? r.seq : r.head) = dims[2];
    (seq == 1 ? r.head : r.seq) = 1;
    return r;
  }
};

inline ffi::ErrorOr<Layout> parse_layout(const char* op, std::string_view layout) {
  if (layout == "BTNH") return Layout{1, 2};
  if (layout == "BNTH") return Layout{2, 1};
  return ffi::Unexpected(invalid(std::string(op) + ": layout is unknown, got '" +
                                 std::string(layout) + "'; allowed are BTNH and BNTH"));
}

// ---- checks

inline ffi::Error first_error(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& e : errors) {
    if (e.failure()) return e;
  }
  return ffi::Error::Success();
}

// An operand's batch must divide the call's: entry b of the call reads b % batches.
[[nodiscard]] inline ffi::Error check_batches(const NamedBuffers& buffers, const char* name,
                                              int64_t batch) {
  const auto dims = buffers[name].dimensions();
  if (dims.size() == 0 || dims[0] < 1 || batch % dims[0] != 0) {
    return invalid(std::string(buffers.op()) + ": " + name + " has the wrong batch, got " +
                   shape_text(dims) + "; its first axis must divide " + std::to_string(batch));
  }
  return ffi::Error::Success();
}

template <class T>
Table<const T> table(const NamedBuffers& buffers, const char* name) {
  const ffi::AnyBuffer* buffer = buffers.find(name);
  if (buffer == nullptr) return {};
  const auto dims = buffer->dimensions();
  return {reinterpret_cast<const T*>(buffer->untyped_data()), static_cast<int>(dims[0]),
          dims.size() > 1 ? dims[1] : 1};
}

// An optional operand: when present it must have this dtype and shape (first axis: a dividing
// batch).
[[nodiscard]] inline ffi::Error check_table(const NamedBuffers& buffers, const char* name,
                                            DType dtype, int64_t batch,
                                            std::vector<int64_t> shape_after_batch) {
  if (buffers.find(name) == nullptr) return ffi::Error::Success();
  shape_after_batch.insert(shape_after_batch.begin(), -1);
  if (ffi::Error e = check_buffer(buffers, name, dtype, shape_after_batch); e.failure()) return e;
  return check_batches(buffers, name, batch);
}

// A contiguous operand of four axes, each of which may have one entry for all.
template <class Dims>
Broadcast contiguous_broadcast(const void* data, DType dtype, const Dims& dims) {
  return {data,
          dtype,
          static_cast<int>(dims[0]),
          dims[1] * dims[2] * dims[3],
          dims[1] == 1 ? 0 : dims[2] * dims[3],
          dims[2] == 1 ? 0 : dims[3],
          dims[3] == 1 ? 0 : 1};
}

// bias and mask: (batches, 1 or N, 1 or T, 1 or S)
[[nodiscard]] inline ffi::Error broadcast_operand(const NamedBuffers& buffers, const char* name,
                                                  const Problem& problem, Broadcast* out) {
  const ffi::AnyBuffer* buffer = buffers.find(name);
  if (buffer == nullptr) return ffi::Error::Success();
  const auto dims = buffer->dimensions();
  const int64_t full[] = {0, problem.q_heads, problem.q_len, problem.kv_len};
  bool ok = dims.size() == 4;
  for (int i = 1; ok && i < 4; ++i) ok = dims[i] == 1 || dims[i] == full[i];
  const std::optional<DType> dtype = to_dtype(buffer->element_type());
  const bool is_mask = std::string_view(name) == "mask";
  ok = ok && dtype &&
       (is_mask ? *dtype == DType::kPred
                : *dtype == DType::kF16 || *dtype == DType::kBF16 || *dtype == DType::kF32 ||
                      (*dtype == DType::kF64 && problem.dtype == DType::kF64));
  if (!ok) {
    return invalid(std::string(buffers.op()) + ": " + name + " has the wrong shape or dtype, got " +
                   shape_text(dims) + "; it must broadcast to (batch, query heads, T, S) and be " +
                   (is_mask ? "bool" : "a float type"));
  }
  if (ffi::Error e = check_batches(buffers, name, problem.batch); e.failure()) return e;
  *out = contiguous_broadcast(buffer->untyped_data(), *dtype, dims);
  return ffi::Error::Success();
}

// Sizes and dtype from query, key and value; every operand's own checks follow.
inline ffi::ErrorOr<Problem> make_problem(const char* op, const Layout& layout,
                                          const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
                                          const ffi::AnyBuffer& v) {
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  const std::optional<DType> dtype = to_dtype(q.element_type());
  std::string problem;
  if (qd.size() != 4 || kd.size() != 4 || vd.size() != 4) {
    problem = "query, key and value must have rank 4";
  } else if (!dtype || (*dtype != DType::kF64 && *dtype != DType::kF32 && *dtype != DType::kF16 &&
                        *dtype != DType::kBF16)) {
    problem = "query has an unsupported dtype";
  } else if (qd[3] != kd[3]) {
    problem = "query and key differ in head dim";
  } else if (kd[0] < 1 || vd[0] < 1 || kd[layout.seq] != vd[layout.seq] ||
             kd[layout.head] != vd[layout.head]) {
    problem = "key and value differ in length or heads, or are empty";
  } else if (kd[layout.head] < 1 || qd[layout.head] % kd[layout.head] != 0) {
    problem = "the query heads are not a multiple of the key heads";
  }
  for (const auto& dims : {qd, kd, vd}) {
    for (size_t i = 0; i < dims.size(); ++i) {
      if (dims[i] > std::numeric_limits<int32_t>::max())
        problem = "an axis is longer than 2^31 - 1";
    }
  }
  if (!problem.empty()) {
    return ffi::Unexpected(invalid(std::string(op) + ": " + problem + ", got query " +
                                   shape_text(qd) + ", key " + shape_text(kd) + ", value " +
                                   shape_text(vd)));
  }
  return Problem{static_cast<int>(qd[0]),           static_cast<int>(qd[layout.seq]),
                 static_cast<int>(kd[layout.seq]),  static_cast<int>(qd[layout.head]),
                 static_cast<int>(kd[layout.head]), static_cast<int>(qd[3]),
                 static_cast<int>(vd[3]),           *dtype};
}

inline DType row_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// ---- the operations

struct Call {
  NamedBuffers operands, results;
  Layout layout;
};

template <class Attrs>
ffi::ErrorOr<Call> bind_call(const char* op, const Attrs& attrs, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, const std::vector<BufferName>& operands,
                             const std::vector<BufferName>& results) {
  auto layout = parse_layout(op, attrs.layout);
  if (!layout.has_value()) return ffi::Unexpected(layout.error());
  auto bound_operands =
      NamedBuffers::bind(op, attrs.operands, args.size(), operands,
                         [&](size_t i) { return args.template get<ffi::AnyBuffer>(i); });
  if (!bound_operands.has_value()) return ffi::Unexpected(bound_operands.error());
  auto bound_results = NamedBuffers::bind(op, attrs.results, rets.size(), results, [&](size_t i) {
    return rets.template get<ffi::AnyBuffer>(i);
  });
  if (!bound_results.has_value()) return ffi::Unexpected(bound_results.error());
  return Call{*bound_operands, *bound_results, *layout};
}

// Everything that shapes the scores, from a prefill's operands; o and lse are left to the caller,
// since they are results forward and operands backward. The call's batch is that of `out`.
inline ffi::ErrorOr<PrefillParams> make_scoring_params(const char* op, const PrefillAttrs& attrs,
                                                       const Layout& layout, const NamedBuffers& in,
                                                       const ffi::AnyBuffer& out) {
  auto problem = make_problem(op, layout, in["query"], in["key"], in["value"]);
  if (!problem.has_value()) return ffi::Unexpected(problem.error());
  PrefillParams p{};
  p.problem = *problem;
  if (out.dimensions().size() != 4) {
    return ffi::Unexpected(invalid(std::string(op) + ": out must have rank 4"));
  }
  p.problem.batch = static_cast<int>(out.dimensions()[0]);
  const int64_t batch = p.problem.batch;
  const Problem& pr = p.problem;
  if (batch == 0) return p;
  ffi::Error e = first_error(
      {check_buffer(in, "query", pr.dtype, layout.shape(-1, pr.q_len, pr.q_heads, pr.head_dim)),
       check_buffer(in, "key", pr.dtype, layout.shape(-1, pr.kv_len, pr.kv_heads, pr.head_dim)),
       check_buffer(in, "value", pr.dtype, layout.shape(-1, pr.kv_len, pr.kv_heads, pr.value_dim)),
       check_batches(in, "query", batch), check_batches(in, "key", batch),
       check_batches(in, "value", batch),
       check_table(in, "query_seq_lengths", DType::kS32, batch, {}),
       check_table(in, "key_value_seq_lengths", DType::kS32, batch, {}),
       check_table(in, "alibi_slopes", DType::kF32, batch, {pr.q_heads}),
       check_table(in, "query_segment_ids", DType::kS32, batch, {pr.q_len}),
       check_table(in, "key_value_segment_ids", DType::kS32, batch, {pr.kv_len}),
       check_table(in, "sinks", DType::kF32, batch, {pr.q_heads}),
       broadcast_operand(in, "bias", pr, &p.features.bias),
       broadcast_operand(in, "mask", pr, &p.features.mask)});
  if (e.failure()) return ffi::Unexpected(e);
  if ((in.find("query_segment_ids") == nullptr) != (in.find("key_value_segment_ids") == nullptr)) {
    return ffi::Unexpected(
        invalid(std::string(op) + ": segment ids must be given for both queries and keys"));
  }
  if (attrs.scale < 0 || attrs.softcap < 0 || attrs.window_left < 0 || attrs.window_right < 0) {
    return ffi::Unexpected(
        invalid(std::string(op) + ": scale, softcap and windows must not be negative"));
  }
  p.scores = {attrs.scale, attrs.softcap, attrs.window_left, attrs.window_right,
              attrs.bottom_right};
  p.features.alibi_slopes = table<float>(in, "alibi_slopes");
  p.features.query_segments = table<int32_t>(in, "query_segment_ids");
  p.features.key_segments = table<int32_t>(in, "key_value_segment_ids");
  p.features.sinks = table<float>(in, "sinks");
  p.query_lengths = table<int32_t>(in, "query_seq_lengths");
  p.key_lengths = table<int32_t>(in, "key_value_seq_lengths");
  p.q = layout.strided(in["query"]);
  p.k = layout.strided(in["key"]);
  p.v = layout.strided(in["value"]);
  return p;
}

// A number for each query row, full batch. Without the buffer the data stays null.
[[nodiscard]] inline ffi::Error bind_rows(const NamedBuffers& buffers, const char* name,
                                          const Layout& layout, const Problem& pr, Rows* rows) {
  const ffi::AnyBuffer* buffer = buffers.find(name);
  if (buffer == nullptr) return ffi::Error::Success();
  ffi::Error e = check_buffer(buffers, name, row_dtype(pr.dtype),
                              layout.row_shape(pr.batch, pr.q_len, pr.q_heads));
  if (!e.failure()) *rows = layout.rows(*buffer);
  return e;
}

// out and lse, wherever they are: full batch, and what prefill would write.
[[nodiscard]] inline ffi::Error bind_outputs(const NamedBuffers& buffers, const Layout& layout,
                                             const Problem& pr, Strided* o, Rows* lse) {
  ffi::Error e = check_buffer(buffers, "out", pr.dtype,
                              layout.shape(pr.batch, pr.q_len, pr.q_heads, pr.value_dim));
  if (e.failure()) return e;
  *o = layout.strided(buffers["out"]);
  return bind_rows(buffers, "lse", layout, pr, lse);
}

inline ffi::ErrorOr<PrefillParams> make_prefill_params(const PrefillAttrs& attrs,
                                                       const Call& call) {
  auto p = make_scoring_params("prefill", attrs, call.layout, call.operands, call.results["out"]);
  if (!p.has_value()) return p;
  ffi::Error e = bind_outputs(call.results, call.layout, p->problem, &p->o, &p->lse);
  if (e.failure()) return ffi::Unexpected(e);
  if (const ffi::AnyBuffer* workspace = call.results.find("workspace")) {
    p->workspace = workspace->untyped_data();
    p->workspace_size = static_cast<int64_t>(workspace->size_bytes());
  }
  return p;
}

inline ffi::ErrorOr<BackwardParams> make_backward_params(const BackwardAttrs& attrs,
                                                         const Call& call) {
  const NamedBuffers &in = call.operands, &out = call.results;
  const Layout& layout = call.layout;
  auto forward = make_scoring_params("backward", attrs, layout, in, in["out"]);
  if (!forward.has_value()) return ffi::Unexpected(forward.error());
  BackwardParams p{};
  p.forward = *forward;
  const Problem& pr = p.forward.problem;
  const int64_t batch = pr.batch;
  ffi::Error e = first_error(
      {bind_outputs(in, layout, pr, &p.forward.o, &p.forward.lse),
       check_buffer(in, "dout", pr.dtype, layout.shape(batch, pr.q_len, pr.q_heads, pr.value_dim)),
       bind_rows(in, "dlse", layout, pr, &p.dlse),
       check_buffer(out, "dquery", pr.dtype,
                    layout.shape(batch, pr.q_len, pr.q_heads, pr.head_dim)),
       check_buffer(out, "dkey", pr.dtype,
                    layout.shape(batch, pr.kv_len, pr.kv_heads, pr.head_dim)),
       check_buffer(out, "dvalue", pr.dtype,
                    layout.shape(batch, pr.kv_len, pr.kv_heads, pr.value_dim))});
  if (e.failure()) return ffi::Unexpected(e);
  p.dout = layout.strided(in["dout"]);
  p.dq = layout.strided(out["dquery"]);
  p.dk = layout.strided(out["dkey"]);
  p.dv = layout.strided(out["dvalue"]);
  if (out.find("dsinks") != nullptr) {
    if (!p.forward.features.sinks) {
      return ffi::Unexpected(invalid("backward: dsinks is asked for, but there are no sinks"));
    }
    e = check_buffer(out, "dsinks", DType::kF32, {batch, pr.q_heads});
    if (e.failure()) return ffi::Unexpected(e);
    p.dsinks = reinterpret_cast<float*>(out["dsinks"].untyped_data());
  }
  if (out.find("dbias") != nullptr) {
    if (p.forward.features.bias.data == nullptr) {
      return ffi::Unexpected(invalid("backward: dbias is asked for, but there is no bias"));
    }
    e = check_buffer(out, "dbias", DType::kF32, {batch, pr.q_heads, pr.q_len, pr.kv_len});
    if (e.failure()) return ffi::Unexpected(e);
    p.dbias = reinterpret_cast<float*>(out["dbias"].untyped_data());
  }
  p.deterministic = attrs.deterministic;
  if (const ffi::AnyBuffer* workspace = out.find("workspace")) {
    p.workspace = reinterpret_cast<float*>(workspace->untyped_data());
    p.workspace_size = static_cast<int64_t>(workspace->size_bytes() / sizeof(float));
  }
  return p;
}

inline ffi::ErrorOr<DecodeParams> make_decode_params(const DecodeAttrs& attrs, const Call& call) {
  const char* op = "decode";
  const NamedBuffers &in = call.operands, &out = call.results;
  const Layout& layout = call.layout;
  // Without values of their own, the keys' first dimensions are the values, as many as `out` has.
  const bool values_in_keys = in.find("value_cache") == nullptr;
  const ffi::AnyBuffer& value_cache = values_in_keys ? in["key_cache"] : in["value_cache"];
  auto problem = make_problem(op, layout, in["query"], in["key_cache"], value_cache);
  if (!problem.has_value()) return ffi::Unexpected(problem.error());
  DecodeParams p{};
  p.problem = *problem;
  Problem& pr = p.problem;
  if (out["out"].dimensions().size() != 4)
    return ffi::Unexpected(invalid("decode: out must have rank 4"));
  if (values_in_keys) {
    if (out["out"].dimensions()[3] > pr.head_dim) {
      return ffi::Unexpected(invalid("decode: out is wider than the keys that hold its values"));
    }
    pr.value_dim = static_cast<int>(out["out"].dimensions()[3]);
  }
  pr.batch = static_cast<int>(out["out"].dimensions()[0]);
  if (pr.batch == 0) return p;
  const std::optional<DType> cache_dtype = to_dtype(in["key_cache"].element_type());
  const bool eight_bit =
      cache_dtype && (*cache_dtype == DType::kF8E4M3 || *cache_dtype == DType::kS8);
  if (!cache_dtype || (*cache_dtype != pr.dtype && !eight_bit)) {
    return ffi::Unexpected(invalid(
        "decode: key_cache has the wrong dtype; it must be the query's, float8_e4m3fn or int8"));
  }
  p.cache_dtype = *cache_dtype;
  const bool paged = in.find("page_table") != nullptr;
  const int64_t page_size = pr.kv_len;  // of a paged cache: the cache's own length axis
  ffi::Error e = first_error({check_batches(in, "query", pr.batch),
                              check_buffer(in, "key_cache", p.cache_dtype,
                                           layout.shape(-1, page_size, pr.kv_heads, pr.head_dim)),
                              check_table(in, "seq_lens", DType::kS32, pr.batch, {}),
                              check_table(in, "page_table", DType::kS32, pr.batch, {-1}),
                              check_table(in, "sinks", DType::kF32, pr.batch, {pr.q_heads})});
  if (!values_in_keys && !e.failure()) {
    e = check_buffer(in, "value_cache", p.cache_dtype,
                     layout.shape(-1, page_size, pr.kv_heads, pr.value_dim));
  }
  if (e.failure()) return ffi::Unexpected(e);
  p.k = layout.strided(in["key_cache"]);
  p.v = layout.strided(value_cache);
  p.values_in_keys = values_in_keys;
  if (paged) {
    p.page_size = static_cast<int>(page_size);
    p.num_pages = p.k.batches;
    if (p.v.batches != p.num_pages) {
      return ffi::Unexpected(invalid("decode: key_cache and value_cache differ in pages"));
    }
    p.page_table = table<int32_t>(in, "page_table");
    const int64_t capacity = p.page_table.width * page_size;
    if (capacity > std::numeric_limits<int32_t>::max()) {
      return ffi::Unexpected(invalid("decode: a sequence's pages hold more than 2^31 - 1 tokens"));
    }
    pr.kv_len = static_cast<int>(capacity);
  } else {
    for (const char* cache : {"key_cache", "value_cache"}) {
      if (in.find(cache) == nullptr) continue;
      if (e = check_batches(in, cache, pr.batch); e.failure()) return ffi::Unexpected(e);
    }
  }
  for (const char* scale : {"key_scale", "value_scale"}) {
    if (in.find(scale) == nullptr) continue;
    if (!eight_bit) {
      return ffi::Unexpected(invalid(std::string("decode: ") + scale +
                                     " is given, but the cache is not an 8-bit one"));
    }
    // one scale a head, or one a page and head
    e = check_buffer(in, scale, DType::kF32, {-1, pr.kv_heads});
    const int64_t rows = e.failure() ? 0 : in[scale].dimensions()[0];
    if (!e.failure() && rows != 1 && !(paged && rows == p.num_pages)) {
      e = invalid(std::string("decode: ") + scale +
                  " must have shape (1, kv heads), or (pages, kv " +
                  "heads) with a paged cache, got " + shape_text(in[scale].dimensions()));
    }
    if (e.failure()) return ffi::Unexpected(e);
  }
  p.key_scale = table<float>(in, "key_scale");
  p.value_scale = table<float>(in, "value_scale");
  if (attrs.scale < 0 || attrs.softcap < 0 || attrs.window_left < 0 || attrs.num_splits < 0) {
    return ffi::Unexpected(
        invalid("decode: scale, softcap, window and num_splits must not be negative"));
  }
  p.scores = {attrs.scale, attrs.softcap, attrs.window_left, 0, true};
  p.q = layout.strided(in["query"]);
  p.seq_lens = table<int32_t>(in, "seq_lens");
  p.sinks = table<float>(in, "sinks");
  p.num_splits = attrs.num_splits;
  p.batch_invariant = attrs.batch_invariant;
  e = bind_outputs(out, layout, pr, &p.o, &p.lse);
  if (e.failure()) return ffi::Unexpected(e);
  if (const ffi::AnyBuffer* workspace = out.find("workspace")) {
    p.workspace = reinterpret_cast<float*>(workspace->untyped_data());
    p.workspace_size = static_cast<int64_t>(workspace->size_bytes() / sizeof(float));
  }
  return p;
}

}  // namespace flashattn

#endif  // FLASHATTN_MAKE_PARAMS_H_
