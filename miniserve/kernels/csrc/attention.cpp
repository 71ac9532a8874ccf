// RoPE, cache write and paged attention of one layer, for decoding, prompts and parts of prompts alike.
//
// The cache holds 32 tokens of a head as one packed matrix, ready to be the right side of a product: keys as chunks of
// 32 dimensions by 32 tokens, values as panels of 32 dimensions, each one chunk of 32 tokens. The query heads that share
// a key head, times the new tokens of a request, are the rows of a product. The softmax goes over spans of 256 keys,
// which begin at multiples of 256 (Dao et al., 2022): where a query stands in its step does not change its result.

#include <atomic>

#include "kernels.h"
#include "threads.h"

namespace miniserve {
namespace {

constexpr int kSpanTiles = 8;  // of 32 keys each
constexpr int kSpan = kSpanTiles * kChunk;
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // below any score, yet a difference of two is finite

template <class E>
struct CacheTile {
  E *keys, *values;
};

// The cache's 32 tokens from `first_token` of a request on.
template <class E>
class Cache {
 public:
  Cache(E* data, const Heads& heads, int64_t block_size)
      : data_(data), num_kv_heads_(heads.num_kv_heads), size_(cache_tile_size(heads.head_dim)), block_size_(block_size) {}

  CacheTile<E> tile(const int64_t* block_table, int64_t first_token, int64_t kv_head) const {
    const int64_t block = block_table[first_token / block_size_];
    const int64_t index = (block * block_size_ + first_token % block_size_) / kChunk;
    E* keys = data_ + (index * 2 * num_kv_heads_ + kv_head) * size_;
    return {keys, keys + num_kv_heads_ * size_};
  }

 private:
  E* data_;
  int64_t num_kv_heads_, size_, block_size_;
};

// One head of one token, as floats while it is worked on.
constexpr int64_t kMostHeadDim = 512;

void normalise_head(float* x, int64_t size, const float* norm, float eps) {
  float squares = 0.0f;
  for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i++) x[i] = x[i] * inverse * norm[i];
}

// Dimensions i and i + rotary_dim / 2 are a pair; the table has the sine's sign (see layers/rotary.py).
void rotate(float* x, int64_t rotary_dim, const float* table, int64_t position) {
  const float* cos = table + position * 2 * rotary_dim;
  const float* sin = cos + rotary_dim;
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

template <class E>
void prepare_head(E* head, const Heads& heads, const float* norm, int64_t position) {
  float x[kMostHeadDim];
  for (int64_t i = 0; i < heads.head_dim; i++) x[i] = to_float(head[i]);
  if (norm) normalise_head(x, heads.head_dim, norm, heads.eps);
  if (heads.rope) rotate(x, heads.rotary_dim, heads.rope, position);
  for (int64_t i = 0; i < heads.head_dim; i++) set(head[i], x[i]);
}

template <class E>
void write_to_cache(const E* key, const E* value, int64_t head_dim, CacheTile<E> tile, int token) {
  for (int64_t d = 0; d < head_dim; d++) {
    const int64_t chunk = d / kChunk * kChunkSize;
    const int within = static_cast<int>(d % kChunk);
    tile.keys[chunk + chunk_offset(key, within, token)] = key[d];
    tile.values[chunk + chunk_offset(value, token, within)] = value[d];
  }
}

// Prepares a share of the step's heads: queries in place, keys in place and, with their values, into the cache.
template <class E>
void prepare_heads(E* qkv, const Heads& heads, const Step& step, const Cache<E>& cache, Range own) {
  const int64_t rotated = heads.num_heads + heads.num_kv_heads;
  const int64_t token_size = (rotated + heads.num_kv_heads) * heads.head_dim;
  int64_t request = 0;
  for (int64_t i = own.begin; i < own.end; i++) {
    const int64_t token = i / rotated, head = i % rotated;
    while (token >= step.query_start[request + 1]) request++;
    const int64_t position = step.seq_lens[request] - step.query_start[request + 1] + token;
    E* x = qkv + token * token_size + head * heads.head_dim;
    const bool is_query = head < heads.num_heads;
    prepare_head(x, heads, is_query ? heads.q_norm : heads.k_norm, position);
    if (is_query) continue;
    const int64_t* table = step.block_tables + request * step.max_blocks;
    const CacheTile<E> tile = cache.tile(table, position / kChunk * kChunk, head - heads.num_heads);
    const E* value = x + heads.num_kv_heads * heads.head_dim;
    write_to_cache(x, value, heads.head_dim, tile, static_cast<int>(position % kChunk));
  }
}

// Up to 16 rows of one request and one key head: row r is query head r % group of the new token r / group.
struct Item {
  int64_t request, kv_head, first_row;
  int num_rows;
};

// The work of a step as a list, long prompts' last rows first: they see the most keys.
class Items {
 public:
  Items(const Heads& heads, const Step& step) : heads_(heads), step_(step), group_(heads.num_heads / heads.num_kv_heads) {
    for (int64_t request = 0; request < step.num_requests; request++) count_ += row_tiles(request) * heads.num_kv_heads;
  }

  int64_t count() const { return count_; }

  Item operator[](int64_t index) const {
    int64_t request = 0;
    while (index >= row_tiles(request) * heads_.num_kv_heads) index -= row_tiles(request++) * heads_.num_kv_heads;
    const int64_t first_row = (row_tiles(request) - 1 - index / heads_.num_kv_heads) * kTileRows;
    const int64_t left = num_rows(request) - first_row;
    return {request, index % heads_.num_kv_heads, first_row, static_cast<int>(std::min<int64_t>(kTileRows, left))};
  }

 private:
  int64_t num_rows(int64_t request) const {
    return (step_.query_start[request + 1] - step_.query_start[request]) * group_;
  }
  int64_t row_tiles(int64_t request) const { return round_up(num_rows(request), kTileRows) / kTileRows; }

  const Heads& heads_;
  const Step& step_;
  int64_t group_, count_ = 0;
};

// Attention of one item. Owns the memory for it; one a thread.
template <class E>
class ItemAttention {
 public:
  ItemAttention(const E* qkv, const Heads& heads, const Step& step, const Cache<E>& cache, E* out)
      : qkv_(qkv),
        heads_(heads),
        step_(step),
        cache_(cache),
        out_(out),
        group_(heads.num_heads / heads.num_kv_heads),
        panels_(static_cast<int>(round_up(heads.head_dim, kChunk) / kChunk)) {}

  void run(const Item& item) {
    begin(item);
    for (int64_t key = first_key_ / kSpan * kSpan; key < last_key_; key += kSpan) {
      const int tiles = static_cast<int>(std::min<int64_t>(kSpanTiles, (last_key_ - key + kChunk - 1) / kChunk));
      score(key, tiles);
      for (int row = 0; row < item.num_rows; row++) softmax(row, key, tiles);
      add_values(key, tiles);
    }
    finish();
  }

 private:
  void begin(const Item& item) {
    item_ = item;
    table_ = step_.block_tables + item.request * step_.max_blocks;
    first_token_ = step_.query_start[item.request];
    const int64_t num_new = step_.query_start[item.request + 1] - first_token_;
    const int64_t seq_len = step_.seq_lens[item.request];
    last_key_ = 0;
    first_key_ = seq_len;
    std::fill(&queries_[0][0], &queries_[0][0] + panels_ * kRowTileSize, E{});
    for (int row = 0; row < item.num_rows; row++) {
      const int64_t token = (item.first_row + row) / group_;
      end_[row] = seq_len - num_new + token + 1;
      begin_[row] = heads_.window > 0 ? std::max<int64_t>(0, end_[row] - heads_.window) : 0;
      last_key_ = std::max(last_key_, end_[row]);
      first_key_ = std::min(first_key_, begin_[row]);
      largest_[row] = kLowest;
      total_[row] = 0.0f;
      const E* query = query_of(row);
      for (int64_t d = 0; d < heads_.head_dim; d++) queries_[d / kChunk][row * kChunk + d % kChunk] = query[d];
    }
    std::fill(&sums_[0][0], &sums_[0][0] + panels_ * kRowTileSize, 0.0f);
  }

  const E* query_of(int row) const {
    const int64_t token = first_token_ + (item_.first_row + row) / group_;
    const int64_t token_size = (heads_.num_heads + 2 * heads_.num_kv_heads) * heads_.head_dim;
    return qkv_ + token * token_size + head_of(row) * heads_.head_dim;
  }

  int64_t head_of(int row) const { return item_.kv_head * group_ + (item_.first_row + row) % group_; }

  // scores_ = queries x keys, from key `first` on.
  void score(int64_t first, int tiles) {
    const int64_t bytes = cache_tile_size(heads_.head_dim) * static_cast<int64_t>(sizeof(E));
    for (int t = 0; t < tiles; t++) {
      const CacheTile<E> tile = cache_.tile(table_, first + t * kChunk, item_.kv_head);
      for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(reinterpret_cast<const char*>(tile.values) + byte);
      if (t + 1 < tiles) {
        const CacheTile<E> next = cache_.tile(table_, first + (t + 1) * kChunk, item_.kv_head);
        for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(reinterpret_cast<const char*>(next.keys) + byte);
      }
      const auto chunk_at = [&](int i) { return tile.keys + i * kChunkSize; };
      multiply(&queries_[0][0], item_.num_rows, panels_, chunk_at, kNoFetch, &scores_[0][t * kChunk], kSpan);
    }
  }

  // One step of the online softmax: scores_ of the row become probabilities, what is summed so far is scaled to them.
  void softmax(int row, int64_t first, int tiles) {
    float* scores = scores_[row];
    const int num_keys = tiles * kChunk;
    const int begin = static_cast<int>(std::clamp<int64_t>(begin_[row] - first, 0, num_keys));
    const int end = static_cast<int>(std::clamp<int64_t>(end_[row] - first, 0, num_keys));
    Vec most = broadcast(kLowest);
    for (int key = 0; key < num_keys; key += kLanes) {
      Vec x = load(scores + key) * broadcast(heads_.scale);
      if (heads_.soft_cap > 0.0f) x = broadcast(heads_.soft_cap) * tanh(x / broadcast(heads_.soft_cap));
      store(scores + key, x * broadcast(kLog2E));
      hide(scores, key, begin, end, kLowest);
      most = max(most, load(scores + key));
    }
    const float before = largest_[row];
    const float now = std::max(before, largest(most));
    Vec total = zeros();
    for (int key = 0; key < num_keys; key += kLanes) {
      store(scores + key, exp2(max(broadcast(-126.0f), load(scores + key) - broadcast(now))));
      hide(scores, key, begin, end, 0.0f);
      const Vec p = load(scores + key);
      total = total + p;
      store(&probs_[key / kChunk][row * kChunk + key % kChunk], p);
    }
    const float scale = std::exp2(before - now);
    total_[row] = total_[row] * scale + sum(total);
    largest_[row] = now;
    if (scale != 1.0f) {
      for (int panel = 0; panel < panels_; panel++) {
        float* sums = &sums_[panel][row * kChunk];
        store(sums, load(sums) * broadcast(scale));
        store(sums + kLanes, load(sums + kLanes) * broadcast(scale));
      }
    }
  }

  // Overwrites what the row must not see among the 16 keys from `key` on.
  static void hide(float* scores, int key, int begin, int end, float value) {
    if (key >= begin && key + kLanes <= end) return;
    for (int i = key; i < key + kLanes; i++) {
      if (i < begin || i >= end) scores[i] = value;
    }
  }

  // sums_ += probabilities x values.
  void add_values(int64_t first, int tiles) {
    const E* values[kSpanTiles];
    for (int t = 0; t < tiles; t++) values[t] = cache_.tile(table_, first + t * kChunk, item_.kv_head).values;
    alignas(64) float products[kRowTileSize];
    for (int panel = 0; panel < panels_; panel++) {
      const auto chunk_at = [&](int i) { return values[i] + panel * kChunkSize; };
      multiply(&probs_[0][0], item_.num_rows, tiles, chunk_at, kNoFetch, products, kChunk);
      for (int i = 0; i < item_.num_rows * kChunk; i += kLanes) {
        store(sums_[panel] + i, load(sums_[panel] + i) + load(products + i));
      }
    }
  }

  void finish() {
    for (int row = 0; row < item_.num_rows; row++) {
      const int64_t token = first_token_ + (item_.first_row + row) / group_;
      E* out = out_ + (token * heads_.num_heads + head_of(row)) * heads_.head_dim;
      for (int64_t d = 0; d < heads_.head_dim; d++) {
        set(out[d], sums_[d / kChunk][row * kChunk + d % kChunk] / total_[row]);
      }
    }
  }

  static constexpr int kMostPanels = kMostHeadDim / kChunk;

  const E* qkv_;
  const Heads& heads_;
  const Step& step_;
  const Cache<E>& cache_;
  E* out_;
  int64_t group_;
  int panels_;

  Item item_{};
  const int64_t* table_ = nullptr;
  int64_t first_token_ = 0, first_key_ = 0, last_key_ = 0;
  int64_t begin_[kTileRows], end_[kTileRows];  // the keys that each row sees
  float largest_[kTileRows], total_[kTileRows];
  alignas(64) E queries_[kMostPanels][kRowTileSize];
  alignas(64) float scores_[kTileRows][kSpan];
  alignas(64) E probs_[kSpanTiles][kRowTileSize];
  alignas(64) float sums_[kMostPanels][kRowTileSize];
};

}  // namespace

template <class E>
void attention(E* qkv, const Heads& heads, const Step& step, E* cache_data, int64_t block_size, E* out,
               int num_threads) {
  const Cache<E> cache(cache_data, heads, block_size);
  const Items items(heads, step);
  std::atomic<int64_t> next{0};
  parallel(num_threads, [&](int thread, int threads) {
    const int64_t num_heads = step.num_tokens * (heads.num_heads + heads.num_kv_heads);
    prepare_heads(qkv, heads, step, cache, share(num_heads, thread, threads));
    barrier();
    ItemAttention<E> attention(qkv, heads, step, cache, out);
    TileRegisters registers(kTileRows);
    for (int64_t i = next++; i < items.count(); i = next++) {
      const Item item = items[i];
      registers.resize(item.num_rows);
      attention.run(item);
    }
  });
}

template void attention(bf16*, const Heads&, const Step&, bf16*, int64_t, bf16*, int);
template void attention(float*, const Heads&, const Step&, float*, int64_t, float*, int);

}  // namespace miniserve
