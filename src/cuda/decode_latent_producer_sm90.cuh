// The warp that loads the tiles of a latent decode block: a lane for each box of a tile.
#ifndef FLASHATTN_CUDA_DECODE_LATENT_PRODUCER_SM90_CUH_
#define FLASHATTN_CUDA_DECODE_LATENT_PRODUCER_SM90_CUH_

#include "decode_latent_layout_sm90.cuh"

namespace flashattn {

class LatentProducer {
 public:
  __device__ LatentProducer(const CUtensorMap& map, const DecodeArgs& args,
                            const DecodeBlock& block, LatentTiles tiles, LatentSmem smem,
                            LatentShared& shared, int lane)
      : map_(map),
        args_(args),
        block_(block),
        tiles_(tiles),
        smem_(smem),
        shared_(shared),
        lane_(lane),
        box_tokens_(args.page_table ? min(static_cast<int>(args.page_size.divisor), kLatentTile)
                                    : kLatentTile) {}

  __device__ __forceinline__ void run() {
    Place next = find(0);
#pragma unroll 1
    for (int n = 0; n < tiles_.count; ++n) {
      const Place place = next;
      next = find(n + 1);  // a page's look-up takes as long as a load
      const uint32_t present = keys_present(place);
      for (int part = 0; part < kLatentParts; ++part) load(n, part, place, present);
    }
  }

 private:
  // Of a box in the tensor map: of an absent page, outside of it, where TMA reads zeros.
  struct Place {
    int row, page;
    bool present;
  };

  __device__ Place find(int n) const {
    const int token = (tiles_.first + n) * kLatentTile + lane_ * box_tokens_;
    if (!args_.page_table) return {token, batch_entry(block_.batch, args_.keys.batches), true};
    const int slot = divide(token, args_.page_size);
    const bool needed = n < tiles_.count && lane_ < boxes() && token < block_.keys.end;
    int page = -1;
    if (needed && slot < args_.table_width) {
      const int64_t row = batch_entry(block_.batch, args_.table_batches);
      page = args_.page_table[row * args_.table_width + slot];
    }
    const bool present = page >= 0 && page < args_.num_pages;
    return {token - slot * static_cast<int>(args_.page_size.divisor),
            present ? page : args_.num_pages, present};
  }

  __device__ int boxes() const { return kLatentTile / box_tokens_; }

  __device__ uint32_t keys_present(const Place& place) const {
    const int box_of_lane = lane_ % 8 * kLatentSmallestBox / box_tokens_;
    const bool present = __shfl_sync(~0u, static_cast<int>(place.present), box_of_lane) != 0;
    return __ballot_sync(~0u, present) & 0xff;
  }

  __device__ __forceinline__ void load(int n, int part, const Place& place, uint32_t present) {
    const int stage = latent_stage(n);
    const uint32_t full = shared_address(&shared_.full[stage][part]);
    mbarrier_wait(shared_address(&shared_.empty[stage][part]), latent_parity(n) ^ 1);
    if (lane_ == 0) {
      if (part == 0) shared_.present[stage] = present;
      mbarrier_expect_tx(full, latent_chunks(part) * kLatentChunkBytes);
    }
    __syncwarp();
    if (lane_ >= boxes()) return;
    const int first = latent_first_chunk(part);
    const uint32_t box = smem_.tile(n) + lane_ * box_tokens_ * 128;
#pragma unroll 1
    for (int chunk = first; chunk < first + latent_chunks(part); ++chunk)
      tma_load_4d(box + chunk * kLatentChunkBytes, &map_, full, chunk * 64, place.row,
                  block_.kv_head, place.page);
  }

  const CUtensorMap& map_;
  const DecodeArgs& args_;
  const DecodeBlock& block_;
  const LatentTiles tiles_;
  const LatentSmem smem_;
  LatentShared& shared_;
  const int lane_, box_tokens_;
};

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_DECODE_LATENT_PRODUCER_SM90_CUH_
