#include "explain.h"

#include "backward_plan.h"
#include "decode_latent_plan.h"
#include "decode_plan.h"
#include "instances.h"
#include "launch.h"
#include "tiles_sm80.h"
#include "tiles_sm90.h"

namespace flashattn {
namespace {

template <int... Dims>
int compiled_head_dim(std::integer_sequence<int, Dims...>, int wanted) {
  int found = 0;
  ((found = found == 0 && wanted <= Dims ? Dims : found), ...);
  return found;
}

std::string number(int64_t n) { return std::to_string(n); }

std::string describe_backward_products(const BackwardParams& params) {
  const int head_dim = backward_head_dim_sm90(params.forward.problem.widest_dim());
  const std::string suffix = ", head dim " + number(head_dim) + ": ";
  if (backward_sum(params) != BackwardSum::kNone) {
    return "dK, dV and dQ in one kernel, " + number(backward_tile_sm90(head_dim).rows) +
           " queries a step" + suffix + "5 products instead of 7, dQ is added up in fp32" +
           (params.deterministic ? ", in a fixed order" : "");
  }
  return "dK and dV in one kernel, dQ in another, " + number(backward_dq_tile_sm90(head_dim).keys) +
         " keys a step" + suffix +
         (head_dim > 128 ? "above 128, L2 could not add up dQ fast enough; deterministic, "
                         : "deterministic with features, ") +
         "nothing is added across blocks";
}

std::string describe_backward_sm90(const BackwardParams& params) {
  std::string details = describe_backward_products(params);
  if (backward_may_be_done_again(params.forward)) {
    details +=
        "; steps without a visible pair are skipped; values that are not finite where pairs are "
        "hidden leave the work to the generic kernels, launched behind";
  }
  return details;
}

// Of a head dim above 256.
std::string describe_pieces(int value_dim) {
  const int groups = value_groups_of(value_dim);
  const std::string pieces =
      ": pieces of " + number(kWidePieceColumns) + " columns, since a whole row does not fit";
  return groups == 1 ? pieces
                     : pieces + "; " + number(groups) + " blocks of " + number(kWideValueColumns) +
                           " value columns, each making the scores";
}

}  // namespace

Explained explain_prefill(const PrefillParams& params, const Device& device) {
  const Choice choice = choose_prefill(params, device);
  const Problem& problem = params.problem;
  if (choice.path == Choice::kNone) return {"", choice.reason, ""};
  if (choice.path == Choice::kSm90) {
    const TileSm90 tile = prefill_tile_sm90(params);
    const int packed = packed_heads_sm90(tile, params);
    std::string details =
        "tile " + number(tile.block_q()) + "x" + number(tile.block_kv) + ", head dim " +
        number(tile.head_dim) +
        (tile.value_dim < tile.head_dim ? " with values of " + number(tile.value_dim) : "") + ", " +
        number(tile.warpgroups) + " consumer warpgroups: " + tile.why;
    if (packed > 1) details += "; " + number(packed) + " query heads share a tile's rows";
    if (params.features.mask.data) details += "; a kernel ahead packs the mask into bits";
    return {"sm90", "", details};
  }
  const int head_dim = compiled_head_dim(GenericHeadDims{}, problem.widest_dim());
  const PrefillTileSm80 tile = prefill_tile_sm80(head_dim);
  std::string details = "tile " + number(tile.block_q) + "x" + number(kPrefillBlockKv) +
                        ", head dim " + number(head_dim) + ", " + number(tile.warps) + " warps";
  if (is_wide(head_dim)) details += describe_pieces(problem.value_dim);
  return {"sm80", choice.reason, details};
}

Explained explain_backward(const BackwardParams& params, const Device& device) {
  const Choice choice = choose_backward(params, device);
  if (choice.path == Choice::kNone) return {"", choice.reason, ""};
  if (choice.path == Choice::kSm90) return {"sm90", "", describe_backward_sm90(params)};
  const Problem& problem = params.forward.problem;
  const int head_dim = compiled_head_dim(GenericHeadDims{}, problem.widest_dim());
  return {"sm80", choice.reason,
          "dK and dV in one kernel, dQ in another, head dim " + number(head_dim) +
              ": deterministic, nothing is added across blocks" +
              (is_wide(head_dim) ? "; streamed rows come in pieces of columns" : "")};
}

Explained explain_decode(const DecodeParams& params, const Device& device) {
  const Choice choice = choose_decode(params, device);
  if (choice.path == Choice::kNone) return {"", choice.reason, ""};
  const DecodeDevice facts = {device.sm_count, device.major, device.shared_memory_per_block};
  if (choice.path == Choice::kSm90) {
    const DecodePlan plan = plan_latent(params, facts);
    return {"decode (sm90 latent)", "",
            "latent kernel, " + number(plan.splits) + " splits" +
                (plan.combines() ? ", merged by a second kernel" : "") + ", " +
                number(plan.row_blocks) + " blocks of 64 query rows: " + plan.reason};
  }
  const int head_dim = compiled_head_dim(GenericHeadDims{}, params.problem.widest_dim());
  const DecodePlan plan = plan_decode(params, head_dim, facts);
  const std::string merge = plan.cluster > 1  ? ", merged inside a cluster"
                            : plan.combines() ? ", merged by a second kernel"
                                              : "";
  const std::string kernel = plan.featured ? "featured lean kernel, "
                             : plan.lean   ? "lean kernel, "
                                           : "general kernel, ";
  return {plan.cluster > 1 ? "decode (sm90 cluster)" : "decode", choice.reason,
          kernel + number(plan.splits) + " splits" + merge + ", " + number(plan.warps) +
              " warps, " + number(plan.stages) + " stages: " + plan.reason};
}

}  // namespace flashattn
