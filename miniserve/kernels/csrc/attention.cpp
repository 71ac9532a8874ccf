// RoPE, cache write and paged attention of one layer, for decoding, prompts and parts of prompts alike.
//
// The query heads that share a key head, times the new tokens of a request, are the rows of a product with what the
// cache holds (see span.h). Each span of 256 keys, which begins at a multiple of 256, has a softmax of its own, and
// spans are added up in their order (Dao et al., 2022): where a query stands in its step, or who computes what, does
// not change its result.

#include <atomic>
#include <vector>

#include "attention_work.h"
#include "heads.h"
#include "kernels.h"
#include "kv_cache.h"
#include "span.h"
#include "threads.h"

namespace miniserve {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // below any score, yet a difference of two is finite
constexpr float kLeast = -100.0f;  // the logarithm of the least probability: small, yet no product with it is denormal

// What the keys of some spans give up to 16 rows: an online softmax before its last division (Milakov and Gimelshein,
// 2018). A view of someone's memory.
struct Part {
  float *largest, *total;  // [16], the largest score and the sum of probabilities relative to it
  float* sums;             // [panels of 32 dimensions][16][32], probabilities x values

  explicit Part(float* memory) : largest(memory), total(memory + kTileRows), sums(memory + 2 * kTileRows) {}

  static constexpr int64_t size(int num_panels) { return 2 * kTileRows + num_panels * kRowTileSize; }

  // Adds the part of the keys behind. In this order always, since a sum depends on it.
  void add(const Part& next, int num_rows, int num_panels) {
    for (int row = 0; row < num_rows; row++) {
      const float most = std::max(largest[row], next.largest[row]);
      const float own = std::exp2(largest[row] - most), other = std::exp2(next.largest[row] - most);
      largest[row] = most;
      total[row] = total[row] * own + next.total[row] * other;
      for (int panel = 0; panel < num_panels; panel++) {
        const int first = panel * kRowTileSize + row * kChunk;
        for (int i = first; i < first + kChunk; i += kLanes) {
          store(sums + i, fma(load(sums + i), broadcast(own), load(next.sums + i) * broadcast(other)));
        }
      }
    }
  }
};

// Attention of a thread's units. Owns the memory for it.
template <class E, class Span>
class UnitAttention {
 public:
  using C = typename Span::CacheType;

  UnitAttention(const E* qkv, const Heads& heads, const Step& step, const Cache<C>& cache, E* out)
      : qkv_(qkv),
        heads_(heads),
        step_(step),
        cache_(cache),
        out_(out),
        group_(heads.num_heads / heads.num_kv_heads),
        panels_(num_panels(heads.head_dim)),
        span_(cache, heads.head_dim) {}

  // A whole item. Meanwhile fetches the first keys of `next`, if there is one and they are not at hand already.
  void run(const Item& item, const Item* next) {
    are_keys_new_ = !share_keys(item_, item);
    if (next && share_keys(item, *next)) next = nullptr;
    begin(item);
    Part whole(whole_), part(part_);
    for (int64_t span = item.spans.begin; span < item.spans.end; span++) {
      const bool is_first = span == item.spans.begin, is_last = span + 1 == item.spans.end;
      const Item* fetched = is_last ? next : are_keys_new_ ? &item : nullptr;
      attend(span, is_first ? whole : part, fetched, is_last && next ? next->spans.begin : span + 1);
      if (!is_first) whole.add(part, item.num_rows, panels_);
    }
    finish(item, whole);
  }

  // One span of an item.
  void run(const Item& item, int64_t span, Part& part, const Item* next, int64_t next_span) {
    are_keys_new_ = true;
    begin(item);
    attend(span, part, next, next_span);
  }

  // Adds the parts of an item's spans to the first of them, `parts`; they lie next to each other.
  void add_up(const Item& item, float* parts) {
    Part whole(parts);
    for (int64_t i = 1; i < item.spans.end - item.spans.begin; i++) {
      whole.add(Part(parts + i * Part::size(panels_)), item.num_rows, panels_);
    }
    finish(item, whole);
  }

 private:
  static constexpr int64_t kSpansAtHand = 8;  // that stay in a thread's cache from one item to the next

  static bool share_keys(const Item& a, const Item& b) {
    const bool are_few = b.spans.end - b.spans.begin <= kSpansAtHand;
    return are_few && a.request == b.request && a.kv_head == b.kv_head;
  }

  void begin(const Item& item) {
    item_ = item;
    const int64_t seq_len = step_.seq_lens[item.request];
    const int64_t num_new = step_.query_start[item.request + 1] - step_.query_start[item.request];
    for (int row = 0; row < item.num_rows; row++) {
      end_[row] = seq_len - num_new + (item.first_row + row) / group_ + 1;
      begin_[row] = heads_.window > 0 ? std::max<int64_t>(0, end_[row] - heads_.window) : 0;
      span_.set_query(row, query_of(item, row));
    }
  }

  int64_t token_of(const Item& item, int row) const {
    return step_.query_start[item.request] + (item.first_row + row) / group_;
  }
  int64_t head_of(const Item& item, int row) const { return item.kv_head * group_ + (item.first_row + row) % group_; }
  const E* query_of(const Item& item, int row) const {
    const int64_t token_size = (heads_.num_heads + 2 * heads_.num_kv_heads) * heads_.head_dim;
    return qkv_ + token_of(item, row) * token_size + head_of(item, row) * heads_.head_dim;
  }

  Tiles<C> tiles_of(const Item& item, int64_t span) const {
    const int64_t* table = step_.block_tables + item.request * step_.max_blocks;
    const int64_t first = std::max(span * kSpanTiles, item.first_key / kChunk);
    const int64_t end = std::min((span + 1) * kSpanTiles, item.last_key / kChunk + 1);
    Tiles<C> tiles;
    tiles.first_key = first * kChunk;
    tiles.count = static_cast<int>(end - first);
    for (int t = 0; t < tiles.count; t++) {
      tiles.data[t] = cache_.tile(table, tiles.first_key + t * kChunk, item.kv_head);
    }
    return tiles;
  }

  // The part of one span. While its keys are multiplied, its values are fetched; while these are, the next span's keys.
  void attend(int64_t span, Part& part, const Item* next, int64_t next_span) {
    const Tiles<C> tiles = tiles_of(item_, span);
    const Tiles<C> next_tiles = next ? tiles_of(*next, next_span) : Tiles<C>{};
    span_.score(tiles, item_.num_rows, are_keys_new_, &scores_[0][0]);
    softmax(tiles.first_key, tiles.count * kChunk, part);
    span_.add_values(tiles, next_tiles, item_.num_rows, part.sums);
  }

  // What a row sees of `num_keys` from `first` on, and the whole vectors around it.
  struct Seen {
    int begin, end, from, to;
  };
  Seen seen_by(int row, int64_t first, int num_keys) const {
    const int begin = static_cast<int>(std::clamp<int64_t>(begin_[row] - first, 0, num_keys));
    const int end = static_cast<int>(std::clamp<int64_t>(end_[row] - first, 0, num_keys));
    return {begin, end, begin / kLanes * kLanes, static_cast<int>(round_up(end, kLanes))};
  }

  // The scores_ become probabilities, up to factors that the part knows. All rows' largest first: each takes long to
  // know, but not all together.
  void softmax(int64_t first, int num_keys, Part& part) {
    const Vec factor = broadcast((heads_.soft_cap > 0.0f ? 1.0f : heads_.scale) * kLog2E);  // for powers of 2
    for (int row = 0; row < item_.num_rows; row++) {
      const Seen seen = seen_by(row, first, num_keys);
      if (heads_.soft_cap > 0.0f) cap(scores_[row], seen);
      part.largest[row] = largest_of(scores_[row], seen, factor);
    }
    for (int row = 0; row < item_.num_rows; row++) {
      const Seen seen = seen_by(row, first, num_keys);
      part.total[row] = exponentiate(scores_[row], seen, factor, part.largest[row]);
      std::fill(scores_[row], scores_[row] + seen.from, 0.0f);
      std::fill(scores_[row] + seen.to, scores_[row] + num_keys, 0.0f);
      span_.set_probs(row, scores_[row], num_keys);
    }
  }

  static float largest_of(const float* scores, const Seen& seen, Vec factor) {
    Vec most = broadcast(kLowest);
    for (int key = seen.from; key < seen.to; key += kLanes) {
      most = max(most, hide(load(scores + key) * factor, seen.begin - key, seen.end - key, kLowest));
    }
    return largest(most);
  }

  // Powers of 2 relative to that of `most`; returns their sum.
  static float exponentiate(float* scores, const Seen& seen, Vec factor, float most) {
    Vec total = zeros();
    for (int key = seen.from; key < seen.to; key += kLanes) {
      const Vec p = exp2(max(broadcast(kLeast), fma(load(scores + key), factor, broadcast(-most))));
      const Vec shown = hide(p, seen.begin - key, seen.end - key, 0.0f);
      total = total + shown;
      store(scores + key, shown);
    }
    return sum(total);
  }

  // Scores, scaled, towards no more than the cap.
  void cap(float* scores, const Seen& seen) const {
    const Vec most = broadcast(heads_.soft_cap);
    for (int key = seen.from; key < seen.to; key += kLanes) {
      store(scores + key, most * tanh(load(scores + key) * broadcast(heads_.scale) / most));
    }
  }

  // x with `value` in the lanes before `begin` and from `end` on: keys that the row must not see.
  static Vec hide(Vec x, int begin, int end, float value) {
    if (begin <= 0 && end >= kLanes) return x;
    static constexpr float kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vec lane = load(kLane), hidden = broadcast(value);
    x = choose(at_least(lane, broadcast(static_cast<float>(begin))), x, hidden);
    return choose(greater(broadcast(static_cast<float>(end)), lane), x, hidden);
  }

  void finish(const Item& item, const Part& whole) const {
    alignas(64) float result[kMostHeadDim];
    for (int row = 0; row < item.num_rows; row++) {
      const Vec total = broadcast(whole.total[row] + sink(item, row, whole.largest[row]));
      for (int d = 0; d < panels_ * kChunk; d += kLanes) {
        store(result + d, load(whole.sums + d / kChunk * kRowTileSize + row * kChunk + d % kChunk) / total);
      }
      E* out = out_ + (token_of(item, row) * heads_.num_heads + head_of(item, row)) * heads_.head_dim;
      store_row(result, heads_.head_dim, out);
    }
  }

  // The part of a row's head that goes to no key, relative to that of the largest score.
  float sink(const Item& item, int row, float most) const {
    return heads_.sinks ? std::exp2(heads_.sinks[head_of(item, row)] * kLog2E - most) : 0.0f;
  }

  const E* qkv_;
  const Heads& heads_;
  const Step& step_;
  const Cache<C>& cache_;
  E* out_;
  int64_t group_;
  int panels_;

  Item item_{-1, 0, 0, 0, 0, 0, {0, 0}};  // shares keys with none
  bool are_keys_new_ = true;           // to this thread; else they are in its cache
  int64_t begin_[kTileRows], end_[kTileRows];  // the keys that each row sees
  Span span_;
  alignas(64) float scores_[kTileRows][kSpan];
  alignas(64) float part_[Part::size(kMostPanels)], whole_[Part::size(kMostPanels)];
};

}  // namespace

template <class E, class C>
void attention(E* qkv, const Heads& heads, const Step& step, C* cache_data, int64_t block_size, E* out,
               int num_threads) {
  using Span = std::conditional_t<std::is_same_v<C, E>, PlainSpan<E>, DigitSpan<E>>;
  static thread_local Scratch memory;
  const Cache<C> cache(cache_data, heads, block_size);
  const std::vector<Item> items = items_of(heads, step);
  const Units units(items, num_threads);
  const int64_t part_size = Part::size(num_panels(heads.head_dim));
  float* parts = units.are_spans() ? memory.get<float>(units.count() * part_size) : nullptr;
  Shares shares(units.count(), num_threads);
  std::atomic<int64_t> next_sum{0};
  parallel(num_threads, [&](int thread, int threads) {
    const int64_t num_heads = step.num_tokens * (heads.num_heads + heads.num_kv_heads);
    prepare_heads(qkv, heads, step, cache, share(num_heads, thread, threads));
    barrier();
    UnitAttention<E, Span> attention(qkv, heads, step, cache, out);
    TileRegisters registers = Span::registers();
    for (int64_t i = shares.next(thread), next; i >= 0; i = next) {
      next = shares.next(thread);
      const Item& item = items[units[i].item];
      const Item* next_item = next >= 0 ? &items[units[next].item] : nullptr;
      registers.resize(Span::register_rows(item.num_rows));
      if (units.are_spans()) {
        Part part(parts + i * part_size);
        attention.run(item, units[i].spans.begin, part, next_item, next_item ? units[next].spans.begin : 0);
      } else {
        attention.run(item, next_item);
      }
    }
    if (!units.are_spans()) return;
    barrier();
    const int64_t count = static_cast<int64_t>(items.size());
    for (int64_t i = next_sum++; i < count; i = next_sum++) {
      attention.add_up(items[i], parts + units.first_of(i) * part_size);
    }
  });
}

template void attention(bf16*, const Heads&, const Step&, bf16*, int64_t, bf16*, int);
template void attention(float*, const Heads&, const Step&, float*, int64_t, float*, int);
template void attention(bf16*, const Heads&, const Step&, uint8_t*, int64_t, bf16*, int);
template void attention(float*, const Heads&, const Step&, uint8_t*, int64_t, float*, int);

}  // namespace miniserve
