// y = norm(x) W^T + b as in linear.cpp, with W as small whole numbers, and x made whole numbers too.
//
// A row of x is its scale times digits: 128 x first + second, or the first alone. Two digits are 15 bits, no worse than
// a bf16; the products are those of bytes, which processors do twice as fast as those of bf16, and exact. An element of W
// is scale x (code - zero), or scale x code + offset: what does not depend on the code is taken from sums of the digits.

#include "digits.h"
#include "grid.h"
#include "panel.h"
#include "rows.h"
#include "threads.h"

namespace miniserve {
namespace {

// The rows of x as digits. Row m is rows m D to m D + D - 1 of the digit tiles, its first digits first.
template <int D>
class DigitRows {
 public:
  DigitRows(int64_t num_rows, const Grid& grid, Scratch& digits, Scratch& scales, Scratch& sums)
      : padded_(round_up(grid.size, kDigitChunk)), num_sums_(grid.whole_rows ? D : num_chunks(grid)) {
    const int64_t laid_out = round_up(num_rows * D, kTileRows) / D;
    tiles_ = digits.get<int8_t>(laid_out * D * padded_);
    scales_ = scales.get<float>(laid_out);
    sums_ = sums.get<int32_t>(laid_out * num_sums_);
  }

  int64_t padded() const { return padded_; }

  // Row m, of floats, which are overwritten.
  void set(int64_t m, float* row, const Grid& grid) {
    scales_[m] = make_whole<D>(row, padded_);
    const int64_t first = m * D;
    int8_t* target = tiles_ + first / kTileRows * kTileRows * padded_ + first % kTileRows * kDigitChunk;
    int32_t* sums = sums_ + m * num_sums_;
    std::fill(sums, sums + num_sums_, 0);
    for (int64_t k = 0; k < padded_; k += kGroup) {
      int8_t* digits = target + k / kDigitChunk * kDigitTileSize + k % kDigitChunk;
      if (grid.whole_rows) {
        split_digits<D>(row + k, digits, sums);
      } else {
        int32_t of_group[D] = {};
        split_digits<D>(row + k, digits, of_group);
        if (k < num_sums_ * kGroup) sums[k / kGroup] = D == 1 ? of_group[0] : 128 * of_group[0] + of_group[D - 1];
      }
    }
  }

  const int8_t* tile(int64_t index) const { return tiles_ + index * kTileRows * padded_; }
  float scale(int64_t m) const { return scales_[m]; }

  // With whole rows, of each digit; else of each group, of the whole numbers.
  const int32_t* sums(int64_t m) const { return sums_ + m * num_sums_; }

 private:
  int64_t padded_, num_sums_;
  int8_t* tiles_;
  float* scales_;
  int32_t* sums_;
};

// How a panel is gone through. The first time, what is `ahead` of each chunk, in bytes, is fetched, and codes that the
// times after it need are unpacked.
struct Pass {
  bool is_first;
  int64_t ahead;

  Pass next() const { return {false, ahead}; }
};

// Rows times one panel.
template <class E, int D>
class QuantisedPanelProduct {
 public:
  // `codes` has room for the codes of a panel, a byte each.
  QuantisedPanelProduct(const DigitRows<D>& rows, const QuantisedWeight& weight, const Output& out, uint8_t* codes)
      : rows_(rows),
        weight_(weight),
        grid_(weight.grid),
        output_(weight.grid.columns, weight.bias, out),
        num_chunks_(static_cast<int>(num_chunks(weight.grid))),
        chunk_bytes_(chunk_bytes(weight.grid)),
        codes_(codes) {}

  // range.begin is a multiple of two tiles' rows.
  void run(Range range, int64_t panel) const {
    const uint8_t* data = weight_.data + panel * num_chunks_ * chunk_bytes_;
    const bool is_long = range.end - range.begin > 2 * kTileRows;
    Pass pass{true, is_long ? num_chunks_ * chunk_bytes_ : kFetchedAhead};
    for (int64_t m = range.begin; m < range.end; m += 2 * kRows, pass = pass.next()) {
      const int64_t count = std::min<int64_t>(2 * kRows, range.end - m);
      alignas(64) float sums[2 * kRows * kChunk];
      if (grid_.whole_rows) {
        multiply_whole_rows(data, m, count, panel, pass, sums);
      } else {
        multiply_groups(data, m, std::min<int64_t>(kRows, count), pass, sums);
        if (count > kRows) multiply_groups(data, m + kRows, count - kRows, pass.next(), sums + kRows * kChunk);
      }
      output_.write(sums, m, count, panel);
    }
  }

 private:
  static constexpr int kRows = kTileRows / D;  // of a digit tile

  // sums [count][32] of up to two tiles.
  void multiply_whole_rows(const uint8_t* data, int64_t m, int64_t count, int64_t panel, Pass pass,
                           float* sums) const {
    alignas(64) int32_t products[2][kTileRows * kChunk];
    const auto codes = [&](int i) {
      const uint8_t* chunk = data + i * chunk_bytes_;
      fetch(chunk, pass);
      return chunk;
    };
    const int8_t* left = rows_.tile(m / kRows);
    if (count > kRows) {
      multiply_digits_two<kDigitQuads>(left, rows_.tile(m / kRows + 1), num_chunks_, codes, products[0], products[1]);
    } else {
      multiply_digits<kDigitQuads>(left, static_cast<int>(count) * D, num_chunks_, codes, products[0]);
    }
    const float* scales = weight_.scales + panel * kChunk;
    for (int64_t r = 0; r < count; r++) {
      const int32_t* of_row = &products[0][0] + r * D * kChunk;
      const Vec scale = broadcast(rows_.scale(m + r));
      for (int i = 0; i < kChunk; i += kHalf) {
        const Vec whole = whole_products<D>(of_row + i, rows_.sums(m + r));
        store(sums + r * kChunk + i, whole * load(scales + i) * scale);
      }
    }
  }

  void multiply_groups(const uint8_t* data, int64_t m, int64_t count, Pass pass, float* sums) const {
    if (grid_.bits == 4) {
      multiply_groups<4>(data, m, count, pass, sums);
    } else {
      multiply_groups<8>(data, m, count, pass, sums);
    }
  }

  template <int bits>
  void multiply_groups(const uint8_t* data, int64_t m, int64_t count, Pass pass, float* sums) const {
#if defined(__AMX_INT8__)
    if (count > kMostVectorRows) return multiply_groups_in_tiles<bits>(data, m, count, pass, sums);
#endif
    for (int64_t r = 0; r < count;) {
      float* target = sums + r * kChunk;
      if (count - r >= 4) {
        multiply_group_rows<bits, 4>(data, m + r, pass, target);
        r += 4;
      } else if (count - r >= 2) {
        multiply_group_rows<bits, 2>(data, m + r, pass, target);
        r += 2;
      } else {
        multiply_group_rows<bits, 1>(data, m + r, pass, target);
        r += 1;
      }
      pass = pass.next();
    }
  }

  // sums [R][32] of rows m to m + R, all in registers.
  template <int bits, int R>
  void multiply_group_rows(const uint8_t* data, int64_t m, Pass pass, float* sums) const {
    Vec low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = zeros();
    const int8_t* left = rows_.tile(m / kRows) + m % kRows * D * kDigitChunk;
    for (int group = 0; group < num_chunks_; group++) {
      const uint8_t* chunk = data + group * chunk_bytes_;
      fetch(chunk, pass);
      IntVec low_products[R * D], high_products[R * D];
      for (int i = 0; i < R * D; i++) low_products[i] = high_products[i] = no_ints();
      const int8_t* digits = left + group / 2 * kDigitTileSize + group % 2 * kGroup;
      for (int quad = 0; quad < kGroupQuads; quad++) {
        CodeVec first, second;
        if (bits == 4) {
          load_short_codes(chunk + quad * 64, first, second);
        } else {
          first = load_codes(chunk + quad * 64);
          second = load_codes(chunk + (kGroupQuads + quad) * 64);
        }
        for (int i = 0; i < R * D; i++) {
          low_products[i] = add_quad(low_products[i], first, digits + i * kDigitChunk + quad * 4);
          high_products[i] = add_quad(high_products[i], second, digits + i * kDigitChunk + quad * 4);
        }
      }
      const GroupScales scales(grid_, chunk);
      for (int r = 0; r < R; r++) {
        const int32_t digit_sum = rows_.sums(m + r)[group];
        add_group(&low_products[r * D], digit_sum, scales.low, scales.low_offsets, low[r]);
        add_group(&high_products[r * D], digit_sum, scales.high, scales.high_offsets, high[r]);
      }
    }
    for (int r = 0; r < R; r++) {
      const Vec scale = broadcast(rows_.scale(m + r));
      store(sums + r * kChunk, low[r] * scale);
      store(sums + r * kChunk + kHalf, high[r] * scale);
    }
  }

  // sum += one group's part of 16 columns of a row: its digits' products [D] times scales, its digits times offsets.
  void add_group(const IntVec* products, int32_t digit_sum, Vec scales, Vec offsets, Vec& sum) const {
    IntVec whole = D == 1 ? products[0] : join_digits(products[0], products[D - 1]);
    if (!grid_.has_offsets) whole = minus(whole, zero_of(grid_) * digit_sum);
    sum = fma(scales, to_floats(whole), sum);
    if (grid_.has_offsets) sum = fma(offsets, broadcast(static_cast<float>(digit_sum)), sum);
  }

#if defined(__AMX_INT8__)
  static constexpr int kMostVectorRows = 4;  // beyond, tiles are faster

  // The same for up to a tile of rows. The codes of a panel are unpacked once for all of them.
  template <int bits>
  void multiply_groups_in_tiles(const uint8_t* data, int64_t m, int64_t count, Pass pass, float* sums) const {
    alignas(64) int32_t products[2][kTileRows * kChunk];
    std::fill(sums, sums + count * kChunk, 0.0f);
    for (int group = 0; group < num_chunks_; group++) {
      const uint8_t* chunk = data + group * chunk_bytes_;
      fetch(chunk, pass);
      const uint8_t* codes = chunk;
      if (bits == 4) {
        uint8_t* unpacked = codes_ + group * kGroupCodes;
        if (pass.is_first) unpack_codes(chunk, unpacked);
        codes = unpacked;
      }
      const int8_t* left = rows_.tile(m / kRows) + group / 2 * kDigitTileSize + group % 2 * kGroup;
      multiply_digits<kGroupQuads>(left, kTileRows, 1, [codes](int) { return codes; }, products[group % 2]);
      // The products of the group before are back in memory by now.
      if (group > 0) add_groups<bits>(data, group - 1, m, count, products[(group - 1) % 2], sums);
    }
    add_groups<bits>(data, num_chunks_ - 1, m, count, products[(num_chunks_ - 1) % 2], sums);
    for (int64_t r = 0; r < count; r++) {
      const Vec scale = broadcast(rows_.scale(m + r));
      for (int i = 0; i < kChunk; i += kLanes) store(sums + r * kChunk + i, load(sums + r * kChunk + i) * scale);
    }
  }

  template <int bits>
  void add_groups(const uint8_t* data, int group, int64_t m, int64_t count, const int32_t* products, float* sums) const {
    const GroupScales scales(grid_, data + group * chunk_bytes_);
    for (int64_t r = 0; r < count; r++) {
      IntVec low[D], high[D];
      for (int d = 0; d < D; d++) {
        low[d] = load_ints(products + (r * D + d) * kChunk);
        high[d] = load_ints(products + (r * D + d) * kChunk + kHalf);
      }
      const int32_t digit_sum = rows_.sums(m + r)[group];
      Vec low_sum = load(sums + r * kChunk), high_sum = load(sums + r * kChunk + kHalf);
      add_group(low, digit_sum, scales.low, scales.low_offsets, low_sum);
      add_group(high, digit_sum, scales.high, scales.high_offsets, high_sum);
      store(sums + r * kChunk, low_sum);
      store(sums + r * kChunk + kHalf, high_sum);
    }
  }
#endif

  void fetch(const uint8_t* chunk, Pass pass) const {
    if (!pass.is_first) return;
    for (int64_t byte = 0; byte < chunk_bytes_; byte += 64) prefetch(chunk + pass.ahead + byte);
  }

  const DigitRows<D>& rows_;
  const QuantisedWeight& weight_;
  const Grid& grid_;
  PanelOutput<E> output_;
  int num_chunks_;
  int64_t chunk_bytes_;
  uint8_t* codes_;
};

template <class E, int D>
void multiply(const Rows& rows, const QuantisedWeight& weight, const Output& out, int num_threads) {
  static thread_local Scratch digit_memory, scale_memory, sum_memory, row_memory, code_memory;
  const Grid& grid = weight.grid;
  constexpr int tile_rows = kTileRows / D;
  DigitRows<D> digits(rows.count, grid, digit_memory, scale_memory, sum_memory);
  const int64_t padded = digits.padded(), num_panels = round_up(grid.columns, kChunk) / kChunk;
  // A single tile may be shorter; of several, the last one is filled up with zeros.
  const int64_t laid_out = rows.count <= tile_rows ? rows.count : round_up(rows.count, tile_rows);
  float* row = row_memory.get<float>(num_threads * padded);
  uint8_t* codes = code_memory.get<uint8_t>(num_threads * kChunk * padded);
  Shares panels((rows.count + kBlockRows - 1) / kBlockRows * num_panels, num_threads);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(laid_out, thread, threads);
    for (int64_t m = own.begin; m < own.end; m++) {
      read_row<E>(rows, m, padded, row + thread * padded);
      digits.set(m, row + thread * padded, grid);
    }
    TileRegisters registers(static_cast<int>(std::min<int64_t>(rows.count, tile_rows)) * D, chunk_k(grid));
    const QuantisedPanelProduct<E, D> product(digits, weight, out, codes + thread * kChunk * padded);
    barrier();
    for (int64_t i = panels.next(thread); i >= 0; i = panels.next(thread)) {
      const int64_t first = i / num_panels * kBlockRows;
      product.run({first, std::min(first + kBlockRows, rows.count)}, i % num_panels);
    }
  });
}

}  // namespace

template <class E>
void linear_quantised(const Rows& rows, const QuantisedWeight& weight, int num_digits, const Output& out,
                      int num_threads) {
  if (rows.count == 0) return;
  if (num_digits == 1) {
    multiply<E, 1>(rows, weight, out, num_threads);
  } else {
    multiply<E, 2>(rows, weight, out, num_threads);
  }
}

template void linear_quantised<bf16>(const Rows&, const QuantisedWeight&, int, const Output&, int);
template void linear_quantised<float>(const Rows&, const QuantisedWeight&, int, const Output&, int);

}  // namespace miniserve
