// y = norm(x) W^T + b, and what comes before and after it in a transformer layer, in one pass over the weights.
//
// One parallel region: the rows are normalised and laid out as row tiles, then each thread streams its share of the
// weight panels. Many rows (a long prompt) go block by block.

#include "kernels.h"
#include "threads.h"

namespace miniserve {
namespace {

// Rows that are multiplied by a panel one after the other: as many as stay in the second-level cache beside it.
constexpr int64_t kBlockRows = 256;
// How far ahead of their use weights are fetched while a few rows are multiplied. Many rows fetch the next panel.
constexpr int64_t kFetchedAhead = 2048;

template <class T>
void widen(const T* x, int64_t size, float* row) {
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes) store(row + k, load(x + k));
  for (; k < size; k++) row[k] = to_float(x[k]);
}

// row [size], padded with zeros to whole chunks, divided by its root mean square.
void normalise(float* row, int64_t size, const float* norm, float eps) {
  Vec squares = zeros();
  for (int64_t k = 0; k < size; k += kLanes) {
    const Vec x = load(row + k);
    squares = fma(x, x, squares);
  }
  const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
  for (int64_t k = 0; k < size; k++) row[k] = row[k] * inverse * norm[k];
}

// Lays input row `m` out in its row tile; beyond the last row, zeros.
template <class E>
void lay_out_row(const Rows& rows, int64_t m, int64_t padded, float* row, E* tiles) {
  E* target = tiles + (m / kTileRows) * kTileRows * padded + (m % kTileRows) * kChunk;
  std::fill(row, row + padded, 0.0f);
  if (m < rows.count) {
    const int64_t start = m * rows.size;
    if (rows.is_float) {
      widen(static_cast<const float*>(rows.data) + start, rows.size, row);
    } else {
      widen(static_cast<const E*>(rows.data) + start, rows.size, row);
    }
    if (rows.norm) normalise(row, rows.size, rows.norm, rows.eps);
  }
  for (int64_t k = 0; k < padded; k += kChunk, target += kRowTileSize) {
    store(target, load(row + k));
    store(target + kLanes, load(row + k + kLanes));
  }
}

// What becomes of the sums of one panel: bias, gate, and where they go.
template <class E>
class PanelOutput {
 public:
  PanelOutput(const Weight<E>& weight, const Output& out) : weight_(weight), out_(out) {}

  // sums [count][32] of rows first_row to first_row + count; they are overwritten.
  void write(float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    if (weight_.scales) scale(sums, count, weight_.scales + panel * kChunk);
    if (weight_.bias) add_bias(sums, count, weight_.bias + panel * kChunk);
    switch (out_.epilogue) {
      case Epilogue::kStore:
        return out_.is_float ? put<float, false>(sums, first_row, count, panel)
                             : put<E, false>(sums, first_row, count, panel);
      case Epilogue::kAdd:
        return put<float, true>(sums, first_row, count, panel);
      case Epilogue::kSiluGate:
        return put_gated(sums, first_row, count, panel);
    }
  }

 private:
  static void scale(float* sums, int64_t count, const float* scales) {
    const Vec low = load(scales), high = load(scales + kLanes);
    for (int64_t r = 0; r < count; r++, sums += kChunk) {
      store(sums, load(sums) * low);
      store(sums + kLanes, load(sums + kLanes) * high);
    }
  }

  static void add_bias(float* sums, int64_t count, const float* bias) {
    const Vec low = load(bias), high = load(bias + kLanes);
    for (int64_t r = 0; r < count; r++, sums += kChunk) {
      store(sums, load(sums) + low);
      store(sums + kLanes, load(sums + kLanes) + high);
    }
  }

  template <class T, bool add>
  void put(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t columns = weight_.columns, left = columns - panel * kChunk;
    T* out = static_cast<T*>(out_.data) + first_row * columns + panel * kChunk;
    for (int64_t r = 0; r < count; r++, sums += kChunk, out += columns) {
      if (left >= kChunk) {
        store(out, add ? load(out) + load(sums) : load(sums));
        store(out + kLanes, add ? load(out + kLanes) + load(sums + kLanes) : load(sums + kLanes));
      } else {
        for (int64_t i = 0; i < left; i++) set(out[i], add ? to_float(out[i]) + sums[i] : sums[i]);
      }
    }
  }

  // A panel's first half are gates, its second half is what they let through.
  void put_gated(const float* sums, int64_t first_row, int64_t count, int64_t panel) const {
    const int64_t columns = weight_.columns / 2, left = columns - panel * kLanes;
    E* out = static_cast<E*>(out_.data) + first_row * columns + panel * kLanes;
    for (int64_t r = 0; r < count; r++, sums += kChunk, out += columns) {
      const Vec y = silu(load(sums)) * load(sums + kLanes);
      if (left >= kLanes) {
        store(out, y);
      } else {
        float lanes[kLanes];
        store(lanes, y);
        for (int64_t i = 0; i < left; i++) set(out[i], lanes[i]);
      }
    }
  }

  const Weight<E>& weight_;
  const Output& out_;
};

// Exact: int8 has no more bits than a bf16 keeps.
template <class E>
void widen_chunk(const int8_t* chunk, E* widened) {
  for (int i = 0; i < kChunkSize; i += kLanes) store(widened + i, load(chunk + i));
}

// Rows [rows.begin, rows.end) times one panel; rows.begin is a multiple of a row tile's. `widened` has room for a panel.
template <class E>
class PanelProduct {
 public:
  PanelProduct(const E* tiles, const Weight<E>& weight, const Output& out, E* widened)
      : tiles_(tiles),
        weight_(weight),
        output_(weight, out),
        widened_(widened),
        padded_(round_up(weight.size, kChunk)),
        num_chunks_(static_cast<int>(padded_ / kChunk)) {}

  void run(Range rows, int64_t panel) const {
    const bool few = rows.end - rows.begin <= 2 * kTileRows;
    const int64_t start = panel * kChunk * padded_;
    if (!weight_.quantised) {
      const E* data = weight_.data + start;
      const int64_t ahead = few ? kFetchedAhead : kChunk * padded_ * static_cast<int64_t>(sizeof(E));
      multiply_rows(rows, panel, [data](int i) { return data + i * kChunkSize; }, ahead);
    } else if (few) {
      // A chunk is widened just before it is used, into memory that never leaves the first-level cache.
      const int8_t* data = weight_.quantised + start;
      const auto chunk_at = [this, data](int i) {
        const int8_t* chunk = data + i * kChunkSize;
        for (int byte = 0; byte < kChunkSize; byte += 64) prefetch(chunk + kFetchedAhead + byte);
        E* widened = widened_ + i % 2 * kChunkSize;
        widen_chunk(chunk, widened);
        return widened;
      };
      multiply_rows(rows, panel, chunk_at, 0);
    } else {
      for (int i = 0; i < num_chunks_; i++) {
        widen_chunk(weight_.quantised + start + i * kChunkSize, widened_ + i * kChunkSize);
      }
      multiply_rows(rows, panel, [this](int i) { return widened_ + i * kChunkSize; }, 0);
    }
  }

 private:
  // Meanwhile fetches what lies `ahead` bytes behind the chunks; each pair of row tiles a part of it. 0: nothing.
  template <class ChunkAt>
  void multiply_rows(Range rows, int64_t panel, ChunkAt chunk_at, int64_t ahead) const {
    alignas(64) float sums[2][kRowTileSize];
    const int num_pairs = static_cast<int>(round_up(rows.end - rows.begin, 2 * kTileRows) / (2 * kTileRows));
    for (int pair = 0; pair < num_pairs; pair++) {
      const int64_t m = rows.begin + pair * 2 * kTileRows;
      const Range lines = ahead ? share(kChunkLines<E>, pair, num_pairs) : Range{0, 0};
      const Fetch fetch{ahead, static_cast<int>(lines.begin), static_cast<int>(lines.end)};
      const E* left = tiles_ + m * padded_;
      const int64_t first = std::min<int64_t>(kTileRows, rows.end - m);
      const int64_t second = std::min<int64_t>(kTileRows, rows.end - m - kTileRows);
      if (second > 0) {
        multiply_two(left, left + kTileRows * padded_, num_chunks_, chunk_at, fetch, sums[0], sums[1]);
        output_.write(sums[1], m + kTileRows, second, panel);
      } else {
        multiply(left, static_cast<int>(first), num_chunks_, chunk_at, fetch, sums[0], kChunk);
      }
      output_.write(sums[0], m, first, panel);
    }
  }

  const E* tiles_;
  const Weight<E>& weight_;
  PanelOutput<E> output_;
  E* widened_;
  int64_t padded_;
  int num_chunks_;
};

}  // namespace

template <class E>
void linear(const Rows& rows, const Weight<E>& weight, const Output& out, int num_threads) {
  static thread_local Scratch tile_memory, row_memory, panel_memory;
  if (rows.count == 0) return;
  const int64_t padded = round_up(rows.size, kChunk);
  // A single row tile may be shorter; of several, the last one is filled up with zeros.
  const int64_t laid_out = rows.count <= kTileRows ? rows.count : round_up(rows.count, kTileRows);
  const int64_t num_panels = round_up(weight.columns, kChunk) / kChunk;
  E* tiles = tile_memory.get<E>(round_up(rows.count, kTileRows) * padded);
  float* row = row_memory.get<float>(num_threads * padded);
  E* widened = weight.quantised ? panel_memory.get<E>(num_threads * kChunk * padded) : nullptr;
  Shares panels((rows.count + kBlockRows - 1) / kBlockRows * num_panels, num_threads);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(laid_out, thread, threads);
    for (int64_t m = own.begin; m < own.end; m++) lay_out_row(rows, m, padded, row + thread * padded, tiles);
    TileRegisters registers(static_cast<int>(std::min<int64_t>(rows.count, kTileRows)));
    const PanelProduct<E> product(tiles, weight, out, widened + (widened ? thread * kChunk * padded : 0));
    barrier();
    for (int64_t i = panels.next(thread); i >= 0; i = panels.next(thread)) {
      const int64_t first = i / num_panels * kBlockRows;
      product.run({first, std::min(first + kBlockRows, rows.count)}, i % num_panels);
    }
  });
}

template <class T>
void pack(const T* weight, int64_t columns, int64_t size, T* packed, int num_threads) {
  const int64_t num_chunks = round_up(size, kChunk) / kChunk;
  const int64_t num_panels = round_up(columns, kChunk) / kChunk;
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_panels, thread, threads);
    for (int64_t panel = own.begin; panel < own.end; panel++) {
      T* target = packed + panel * num_chunks * kChunkSize;
      std::fill(target, target + num_chunks * kChunkSize, T{});
      const int64_t valid = std::min<int64_t>(kChunk, columns - panel * kChunk);
      for (int64_t column = 0; column < valid; column++) {
        const T* row = weight + (panel * kChunk + column) * size;
        for (int64_t k = 0; k < size; k++) {
          target[k / kChunk * kChunkSize + chunk_offset(target, k % kChunk, static_cast<int>(column))] = row[k];
        }
      }
    }
  });
}

template <class T>
void unpack_columns(const T* packed, const float* scales, int64_t size, const int64_t* ids, int64_t num_ids, float* out,
                    int num_threads) {
  const int64_t padded = round_up(size, kChunk);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_ids, thread, threads);
    for (int64_t i = own.begin; i < own.end; i++) {
      const T* panel = packed + ids[i] / kChunk * kChunk * padded;
      const int column = static_cast<int>(ids[i] % kChunk);
      const float scale = scales ? scales[ids[i]] : 1.0f;
      for (int64_t k = 0; k < size; k++) {
        out[i * size + k] = scale * to_float(panel[k / kChunk * kChunkSize + chunk_offset(panel, k % kChunk, column)]);
      }
    }
  });
}

template void linear(const Rows&, const Weight<bf16>&, const Output&, int);
template void linear(const Rows&, const Weight<float>&, const Output&, int);
template void pack(const bf16*, int64_t, int64_t, bf16*, int);
template void pack(const float*, int64_t, int64_t, float*, int);
template void pack(const int8_t*, int64_t, int64_t, int8_t*, int);
template void unpack_columns(const bf16*, const float*, int64_t, const int64_t*, int64_t, float*, int);
template void unpack_columns(const float*, const float*, int64_t, const int64_t*, int64_t, float*, int);
template void unpack_columns(const int8_t*, const float*, int64_t, const int64_t*, int64_t, float*, int);

}  // namespace miniserve
