// Into the layout of a quantised matrix, and out of it (see grid.h).

#include "grid.h"
#include "threads.h"

namespace miniserve {

int64_t grid_bytes(const Grid& grid) {
  return round_up(grid.columns, kChunk) / kChunk * num_chunks(grid) * chunk_bytes(grid);
}

void pack_grid(const Grid& grid, const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, uint8_t* packed,
               int num_threads) {
  const int64_t chunks = num_chunks(grid), bytes = chunk_bytes(grid);
  const int k_size = chunk_k(grid);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(round_up(grid.columns, kChunk) / kChunk, thread, threads);
    for (int64_t i = own.begin * chunks; i < own.end * chunks; i++) {
      const int64_t first_column = i / chunks * kChunk, first_k = i % chunks * k_size;
      uint8_t* chunk = packed + i * bytes;
      std::fill(chunk, chunk + bytes, 0);
      for (int column = 0; column < std::min<int64_t>(kChunk, grid.columns - first_column); column++) {
        const uint8_t* row = codes + (first_column + column) * grid.size + first_k;
        for (int k = 0; k < std::min<int64_t>(k_size, grid.size - first_k); k++) {
          const int place = code_offset(grid, k, column);
          if (grid.bits == 8) {
            chunk[place] = row[k];
          } else {
            chunk[place % (kGroupCodes / 2)] |= static_cast<uint8_t>(row[k] << place / (kGroupCodes / 2) * 4);
          }
        }
        if (grid.whole_rows) continue;
        const int64_t group = (first_column + column) * chunks + i % chunks;
        uint8_t* scale = chunk + codes_bytes(grid) + column * sizeof(uint16_t);
        std::memcpy(scale, scales + group, sizeof(uint16_t));
        if (grid.has_offsets) std::memcpy(scale + kHalvesBytes, offsets + group, sizeof(uint16_t));
      }
    }
  });
}

void unpack_quantised_columns(const QuantisedWeight& weight, const int64_t* ids, int64_t num_ids, float factor,
                              float* out, int num_threads) {
  const Grid& grid = weight.grid;
  const int64_t chunks = num_chunks(grid), bytes = chunk_bytes(grid);
  const int k_size = chunk_k(grid);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_ids, thread, threads);
    for (int64_t i = own.begin; i < own.end; i++) {
      const int column = static_cast<int>(ids[i] % kChunk);
      for (int64_t k = 0; k < grid.size; k++) {
        const uint8_t* chunk = weight.data + (ids[i] / kChunk * chunks + k / k_size) * bytes;
        const int place = code_offset(grid, static_cast<int>(k % k_size), column);
        const int code =
            grid.bits == 8 ? chunk[place] : chunk[place % (kGroupCodes / 2)] >> place / (kGroupCodes / 2) * 4 & 15;
        uint16_t halves[2] = {};
        float scale = weight.scales ? weight.scales[ids[i]] : 0.0f;
        if (!grid.whole_rows) {
          const uint8_t* at = chunk + codes_bytes(grid) + column * sizeof(uint16_t);
          std::memcpy(&halves[0], at, sizeof(uint16_t));
          if (grid.has_offsets) std::memcpy(&halves[1], at + kHalvesBytes, sizeof(uint16_t));
          scale = half_to_float(halves[0]);
        }
        const float element = grid.has_offsets ? scale * static_cast<float>(code) + half_to_float(halves[1])
                                               : scale * static_cast<float>(code - zero_of(grid));
        out[i * grid.size + k] = factor * element;
      }
    }
  });
}

}  // namespace miniserve
