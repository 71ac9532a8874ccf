// How the attention of a step is cut into pieces that threads take: what each of them computes, and which keys it reads.
#pragma once

#include <vector>

#include "kernels.h"
#include "span.h"
#include "threads.h"

namespace miniserve {

// Up to 16 rows of one request and one key head: row r is query head r % group of the new token r / group.
struct Item {
  int64_t request, kv_head, first_row;
  int num_rows;
  int64_t first_key, last_key;  // of those that any of the rows sees
  Range spans;                  // that these lie in
};

// The work of a step. Those who share keys and values follow each other, the last rows first: they see the most keys.
inline std::vector<Item> items_of(const Heads& heads, const Step& step) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  std::vector<Item> items;
  for (int64_t request = 0; request < step.num_requests; request++) {
    const int64_t num_new = step.query_start[request + 1] - step.query_start[request];
    const int64_t context = step.seq_lens[request] - num_new, num_rows = num_new * group;
    for (int64_t kv_head = 0; kv_head < heads.num_kv_heads; kv_head++) {
      for (int64_t row = (num_rows - 1) / kTileRows * kTileRows; num_new > 0 && row >= 0; row -= kTileRows) {
        const int count = static_cast<int>(std::min<int64_t>(kTileRows, num_rows - row));
        const int64_t last_key = context + (row + count - 1) / group;
        const int64_t first_key = heads.window > 0 ? std::max<int64_t>(0, context + row / group + 1 - heads.window) : 0;
        const Range spans{first_key / kSpan, last_key / kSpan + 1};
        items.push_back({request, kv_head, row, count, first_key, last_key, spans});
      }
    }
  }
  return items;
}

// What a thread takes at a time: some spans of an item.
struct Unit {
  int64_t item;
  Range spans;
};

// Whole items; or, where a few long ones would leave threads without work, spans. Then the spans' parts are kept apart
// until all are there, and added in their order: the same numbers.
class Units {
 public:
  Units(const std::vector<Item>& items, int num_threads) {
    int64_t longest = 0, total = 0;
    for (const Item& item : items) {
      longest = std::max(longest, item.spans.end - item.spans.begin);
      total += item.spans.end - item.spans.begin;
    }
    are_spans_ = longest > 1 && num_threads > 1 && longest * num_threads * kFewShares > total;
    units_.reserve(are_spans_ ? total : items.size());
    for (size_t i = 0; i < items.size(); i++) {
      const Range spans = items[i].spans;
      first_.push_back(static_cast<int64_t>(units_.size()));
      const int64_t size = are_spans_ ? 1 : spans.end - spans.begin;
      for (int64_t span = spans.begin; span < spans.end; span += size) {
        units_.push_back({static_cast<int64_t>(i), {span, span + size}});
      }
    }
  }

  bool are_spans() const { return are_spans_; }
  int64_t count() const { return static_cast<int64_t>(units_.size()); }
  const Unit& operator[](int64_t i) const { return units_[i]; }
  int64_t first_of(int64_t item) const { return first_[item]; }

 private:
  // Items are split unless the longest is at most a quarter of a thread's share: nobody waits longer for the last one.
  static constexpr int64_t kFewShares = 4;

  bool are_spans_ = false;
  std::vector<Unit> units_;
  std::vector<int64_t> first_;
};

}  // namespace miniserve
