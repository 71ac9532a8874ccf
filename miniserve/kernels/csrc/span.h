// The products of attention: up to 16 rows of queries with the keys of a span, and of probabilities with its values.
//
// A class for each kind of cache. Both take floats and give floats; how the left sides are kept is their own matter.
#pragma once

#include "digits.h"
#include "kv_cache.h"

namespace miniserve {

constexpr int kSpanTiles = 8;  // of 32 keys each
constexpr int kSpan = kSpanTiles * kChunk;
constexpr int kMostPanels = kMostHeadDim / kChunk;

// The tiles of a span's keys and values, from `first_key` on: those before it, which no row sees, are left out.
template <class C>
struct Tiles {
  CacheTile<C> data[kSpanTiles];
  int64_t first_key = 0;
  int count = 0;
};

// A panel of a tile's keys or values into the second-level cache.
template <class C>
inline void fetch_panel(const C* tile, int panel, int64_t more_bytes = 0) {
  const char* start = reinterpret_cast<const char*>(tile + panel * kChunkSize);
  const int64_t bytes = kChunkSize * static_cast<int64_t>(sizeof(C)) + more_bytes;
  for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(start + byte);
}

// With a cache of E: everything is of E.
template <class E>
class PlainSpan {
 public:
  using CacheType = E;

  PlainSpan(const Cache<E>&, int64_t head_dim) : head_dim_(head_dim), panels_(num_panels(head_dim)) {}

  static TileRegisters registers() { return TileRegisters(kTileRows); }
  static int register_rows(int num_rows) { return num_rows; }

  void set_query(int row, const E* query) {
    for (int panel = 0; panel < panels_; panel++) {
      E* target = queries_[panel] + row * kChunk;
      const int64_t left = head_dim_ - panel * kChunk;
      if (left >= kChunk) {
        std::memcpy(target, query + panel * kChunk, kChunk * sizeof(E));
      } else {
        std::fill(std::copy(query + panel * kChunk, query + head_dim_, target), target + kChunk, E{});
      }
    }
  }

  // scores [16][256] = queries x keys. Meanwhile fetches the values, if they are new to the thread.
  void score(const Tiles<E>& tiles, int num_rows, bool are_new, float* scores) {
    for (int t = 0; t < tiles.count; t++) {
      const auto chunk_at = [&](int panel) {
        if (are_new) fetch_panel(tiles.data[t].values, panel);
        return tiles.data[t].keys + panel * kChunkSize;
      };
      multiply(&queries_[0][0], num_rows, panels_, chunk_at, kNoFetch, scores + t * kChunk, kSpan);
    }
  }

  // Probabilities [num_keys] of a row.
  void set_probs(int row, float* probs, int num_keys) {
    for (int key = 0; key < num_keys; key += kLanes) {
      store(&probs_[key / kChunk][row * kChunk + key % kChunk], load(probs + key));
    }
  }

  // sums [panels][16][32] = probabilities x values. Meanwhile fetches the keys of `next`.
  void add_values(const Tiles<E>& tiles, const Tiles<E>& next, int num_rows, float* sums) {
    for (int panel = 0; panel < panels_; panel++) {
      const auto chunk_at = [&](int t) {
        for (int i = t; i < next.count; i += tiles.count) fetch_panel(next.data[i].keys, panel);
        return tiles.data[t].values + panel * kChunkSize;
      };
      multiply(&probs_[0][0], num_rows, tiles.count, chunk_at, kNoFetch, sums + panel * kRowTileSize, kChunk);
    }
  }

 private:
  int64_t head_dim_;
  int panels_;
  alignas(64) E queries_[kMostPanels][kRowTileSize];
  alignas(64) E probs_[kSpanTiles][kRowTileSize];
};

// With a cache of int8: queries, and probabilities times the values' scales, become digits (see quantised.cpp).
template <class E>
class DigitSpan {
 public:
  using CacheType = uint8_t;

  DigitSpan(const Cache<uint8_t>& cache, int64_t head_dim)
      : cache_(cache), head_dim_(head_dim), panels_(num_panels(head_dim)) {}

  static TileRegisters registers() { return TileRegisters(kTileRows, kChunk); }
  static int register_rows(int num_rows) { return std::min(kTileRows, kDigits * num_rows); }

  void set_query(int row, const E* query) {
    alignas(64) float whole[kMostHeadDim];
    load_row(query, head_dim_, whole);
    std::fill(whole + head_dim_, whole + panels_ * kChunk, 0.0f);
    queries_.set(row, whole, panels_);
  }

  void score(const Tiles<uint8_t>& tiles, int num_rows, bool are_new, float* scores) {
    const auto multiply = [&](int t, int32_t* products) {
      const auto chunk_at = [&](int panel) {
        if (are_new) fetch_panel(tiles.data[t].values, panel, panel + 1 == panels_ ? kScaleBytes : 0);
        return tiles.data[t].keys + panel * kChunkSize;
      };
      queries_.multiply(num_rows, panels_, chunk_at, products);
    };
    const auto finish = [&](int t, const int32_t* products) {
      const float* key_scales = cache_.scales(tiles.data[t].keys);
      for (int row = 0; row < num_rows; row++) {
        const Vec scale = broadcast(queries_.scale(row));
        float* target = scores + row * kSpan + t * kChunk;
        for (int i = 0; i < kChunk; i += kHalf) {
          store(target + i, queries_.product(row, products, i) * scale * load(key_scales + i));
        }
      }
      const float* scales = cache_.scales(tiles.data[t].values);
      std::copy(scales, scales + kChunk, value_scales_ + t * kChunk);
    };
    in_turns(tiles.count, multiply, finish);
  }

  // A value that the row must not see has the probability 0, and is not finite perhaps.
  void set_probs(int row, float* probs, int num_keys) {
    for (int key = 0; key < num_keys; key += kLanes) {
      const Vec p = load(probs + key);
      store(probs + key, choose(at_least(zeros(), p), zeros(), p * load(value_scales_ + key)));
    }
    probs_.set(row, probs, num_keys / kChunk);
  }

  void add_values(const Tiles<uint8_t>& tiles, const Tiles<uint8_t>& next, int num_rows, float* sums) {
    const auto multiply = [&](int panel, int32_t* products) {
      const auto chunk_at = [&](int t) {
        for (int i = t; i < next.count; i += tiles.count) {
          fetch_panel(next.data[i].keys, panel, panel + 1 == panels_ ? kScaleBytes : 0);
        }
        return tiles.data[t].values + panel * kChunkSize;
      };
      probs_.multiply(num_rows, tiles.count, chunk_at, products);
    };
    const auto finish = [&](int panel, const int32_t* products) {
      for (int row = 0; row < num_rows; row++) {
        const Vec scale = broadcast(probs_.scale(row));
        for (int i = 0; i < kChunk; i += kHalf) {
          store(sums + panel * kRowTileSize + row * kChunk + i, probs_.product(row, products, i) * scale);
        }
      }
    };
    in_turns(panels_, multiply, finish);
  }

 private:
  static constexpr int kDigits = 2;

  // Finishes each of `count` products while the next one is computed: what was just stored from a tile is slow to load.
  template <class Multiply, class Finish>
  static void in_turns(int count, Multiply multiply, Finish finish) {
    alignas(64) int32_t products[2][2 * kTileRows * kChunk];
    for (int i = 0; i < count; i++) {
      multiply(i, products[i % 2]);
      if (i > 0) finish(i - 1, products[(i - 1) % 2]);
    }
    if (count > 0) finish(count - 1, products[(count - 1) % 2]);
  }

  // Up to 16 rows of `groups` groups of 32 as digits: two digit tiles.
  template <int groups>
  class Digits {
   public:
    void set(int row, float* whole, int num_groups) {
      scales_[row] = make_whole<kDigits>(whole, num_groups * kChunk);
      Vec sums[kDigits] = {zeros(), zeros()};
      int8_t* target = tiles_[row / kRows] + row % kRows * kDigits * kDigitChunk;
      for (int i = 0; i < num_groups; i++) {
        split_digits<kDigits>(whole + i * kChunk, target + digits_at<kGroupQuads>(i), sums);
      }
      for (int digit = 0; digit < kDigits; digit++) sums_[row][digit] = static_cast<int32_t>(sum(sums[digit]));
    }

    template <class Codes>
    void multiply(int num_rows, int num_groups, Codes codes, int32_t* products) const {
      if (num_rows > kRows) {
        multiply_digits_two<kGroupQuads>(tiles_[0], tiles_[1], num_groups, codes, products,
                                         products + kTileRows * kChunk);
      } else {
        multiply_digits<kGroupQuads>(tiles_[0], num_rows * kDigits, num_groups, codes, products);
      }
    }

    Vec product(int row, const int32_t* products, int column) const {
      return whole_products<kDigits>(products + row * kDigits * kChunk + column, sums_[row]);
    }
    float scale(int row) const { return scales_[row]; }

   private:
    static constexpr int kRows = kTileRows / kDigits;

    alignas(64) int8_t tiles_[2][(groups + 1) / 2 * kDigitTileSize] = {};
    float scales_[kTileRows];
    int32_t sums_[kTileRows][kDigits];
  };

  const Cache<uint8_t>& cache_;
  int64_t head_dim_;
  int panels_;
  Digits<kMostPanels> queries_;
  Digits<kSpanTiles> probs_;
  alignas(64) float value_scales_[kSpan];
};

}  // namespace miniserve
