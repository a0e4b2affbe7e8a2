// Prints how the kernels of a build are launched on an H200: for each of a few calls the kernels
// with their threads, dynamic shared memory and cluster size, and for each decode shape among the
// arguments ("batch,length,heads,kv_heads,head_dim") how it is cut; also the tiles of the Hopper
// forward. build.py links this with the objects of the build. The launchers are the build's own;
// only `launch`, defined here, prints where theirs launches.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "decode_plan.h"
#include "launch.h"
#include "params.h"
#include "tiles_sm90.h"

int main(int, char**);

namespace flashattn {

// A kernel is named by its distance from main, which the symbol table of the program resolves.
Status launch(const Launch& what, void**, const Device&, cudaStream_t) {
  const auto distance = reinterpret_cast<intptr_t>(what.kernel) - reinterpret_cast<intptr_t>(&main);
  std::printf("kernel %td %d %d %d %s\n", static_cast<ptrdiff_t>(distance), what.threads,
              what.shared_memory, what.cluster, what.kernel_name);
  return {};
}

Status encode_tensor_map(CUtensorMap*, const TensorMapShape&) { return {}; }
Status encode_tensor_map_4d(CUtensorMap*, const TensorMapShape&) { return {}; }
Status encode_tensor_map_packed(CUtensorMap*, const TensorMapShape&, int) { return {}; }

namespace {

constexpr Device kH200 = {0, 9, 0, 132, 232448}, kGeneric = {0, 8, 0, 132, 232448};
constexpr int kLength = 8192, kHeads = 16;
alignas(16) char somewhere[16];  // every operand; nothing follows its pointer

Strided operand(int batch, int length, int heads, int dim) {
  return {somewhere, batch, int64_t{length} * heads * dim, int64_t{heads} * dim, dim};
}

PrefillParams prefill(int head_dim, bool causal) {
  PrefillParams p = {};
  p.problem = {1, kLength, kLength, kHeads, kHeads, head_dim, head_dim, DType::kBF16};
  if (causal) p.scores.window_right = 0;
  p.q = p.k = p.v = p.o = operand(1, kLength, kHeads, head_dim);
  p.workspace_size = int64_t{1} << 40;
  return p;
}

BackwardParams backward(int head_dim, bool deterministic) {
  BackwardParams p = {};
  p.forward = prefill(head_dim, true);
  p.dout = p.dq = p.dk = p.dv = p.forward.q;
  p.deterministic = deterministic;
  p.workspace_size = int64_t{1} << 40;
  return p;
}

DecodeParams decode(int batch, int length, int heads, int kv_heads, int head_dim,
                    DType cache_dtype) {
  DecodeParams p = {};
  p.problem = {batch, 1, length, heads, kv_heads, head_dim, head_dim, DType::kBF16};
  p.scores.window_right = 0;
  p.cache_dtype = cache_dtype;
  p.q = p.o = operand(batch, 1, heads, head_dim);
  p.k = p.v = operand(batch, length, kv_heads, head_dim);
  p.seq_lens.batches = batch;
  p.key_scale.data = p.value_scale.data = reinterpret_cast<float*>(somewhere);
  p.workspace_size = int64_t{1} << 40;
  return p;
}

// Says what is called, then calls it.
template <class Call>
void show(const std::string& name, int head_dim, Call&& call) {
  std::printf("call %d %s\n", head_dim, name.c_str());
  if (const Status status = call(); !status.ok())
    std::printf("refused %s\n", status.message.c_str());
}

void show_all(int head_dim) {
  for (const bool causal : {true, false})
    show(causal ? "prefill, causal" : "prefill, full", head_dim,
         [&] { return launch_prefill(prefill(head_dim, causal), kH200, nullptr); });
  show("prefill, window", head_dim, [&] {
    PrefillParams window = prefill(head_dim, true);
    window.scores.window_left = 1024;
    return launch_prefill(window, kH200, nullptr);
  });
  show("prefill, soft cap", head_dim, [&] {
    PrefillParams capped = prefill(head_dim, true);
    capped.scores.softcap = 50;
    return launch_prefill(capped, kH200, nullptr);
  });
  show("prefill, generic", head_dim,
       [&] { return launch_prefill(prefill(head_dim, true), kGeneric, nullptr); });
  show("backward", head_dim,
       [&] { return launch_backward(backward(head_dim, false), kH200, nullptr); });
  show("backward, soft cap", head_dim, [&] {
    BackwardParams capped = backward(head_dim, false);
    capped.forward.scores.softcap = 50;
    return launch_backward(capped, kH200, nullptr);
  });
  show("backward, deterministic", head_dim,
       [&] { return launch_backward(backward(head_dim, true), kH200, nullptr); });
  show("backward, generic", head_dim,
       [&] { return launch_backward(backward(head_dim, true), kGeneric, nullptr); });
  const auto decode_call = [&](int batch, DType cache_dtype) {
    return launch_decode(decode(batch, kLength, kHeads, kHeads / 4, head_dim, cache_dtype), kH200,
                         nullptr);
  };
  show("decode, batch 1", head_dim, [&] { return decode_call(1, DType::kBF16); });
  show("decode, batch 32", head_dim, [&] { return decode_call(32, DType::kBF16); });
  show("decode, 8-bit cache", head_dim, [&] { return decode_call(32, DType::kF8E4M3); });
}

// Without those for few tiles: what they read depends on how many there are.
void show_tiles() {
  for (const TileSm90& tile : kPrefillTilesSm90)
    if ((tile.kind == ScoreKind::kFull || tile.kind == ScoreKind::kCausal) &&
        tile.value_dim == tile.head_dim && tile.max_tiles == kUnlimited)
      std::printf("tile %d %d %d %d %d\n", tile.head_dim, tile.kind == ScoreKind::kCausal,
                  tile.max_q_len, tile.block_q(), tile.block_kv);
}

void show_plan(const char* shape) {
  int batch, length, heads, kv_heads, head_dim;
  if (std::sscanf(shape, "%d,%d,%d,%d,%d", &batch, &length, &heads, &kv_heads, &head_dim) != 5)
    return;
  const DecodePlan plan =
      plan_decode(decode(batch, length, heads, kv_heads, head_dim, DType::kBF16), head_dim,
                  {kH200.sm_count, kH200.major, kH200.shared_memory_per_block});
  std::printf("plan %s %d %d %d %d %s\n", shape, plan.splits, plan.cluster, plan.extra_blocks,
              plan.lean, plan.reason);
}

}  // namespace
}  // namespace flashattn

int main(int argc, char** argv) {
  for (const int head_dim : {64, 96, 128, 192, 256}) flashattn::show_all(head_dim);
  flashattn::show_tiles();
  for (int i = 1; i < argc; ++i) flashattn::show_plan(argv[i]);
}
