// y = norm(x) W^T + b, and what comes before and after it in a transformer layer, in one pass over the weights.
//
// One parallel region: the rows are normalised and laid out as row tiles, then each thread streams its share of the
// weight panels. Many rows (a long prompt) go part by part, a block of rows for each thread, so that row tiles stay in
// the second-level cache.

#include "panel.h"
#include "rows.h"
#include "threads.h"
#include "tile.h"

namespace miniserve {
namespace {

// Lays input rows out, all in one row tile; beyond the last row, zeros. Chunk by chunk, as the tile lies in memory.
template <class T, class E>
void lay_out_in_tile(const Rows& rows, Range range, int64_t padded, E* tiles) {
  E* target = tiles + range.begin / kTileRows * kTileRows * padded + range.begin % kTileRows * kChunk;
  const int64_t count = range.end - range.begin;
  const int64_t valid = std::clamp<int64_t>(rows.count - range.begin, 0, count);
  InputRow<T> inputs[kTileRows];
  for (int64_t r = 0; r < valid; r++) inputs[r] = InputRow<T>(rows, range.begin + r);
  for (int64_t k = 0; k < padded; k += kChunk, target += kRowTileSize) {
    for (int64_t r = 0; r < valid; r++) {
      store(target + r * kChunk, inputs[r].at(k));
      store(target + r * kChunk + kLanes, inputs[r].at(k + kLanes));
    }
    std::fill(target + valid * kChunk, target + count * kChunk, E{});
  }
}

// Lays input rows out in their row tiles.
template <class E>
void lay_out(const Rows& rows, Range range, int64_t padded, E* tiles) {
  while (range.begin < range.end) {
    const Range part{range.begin, std::min(range.end, round_up(range.begin + 1, kTileRows))};
    if (rows.is_float) {
      lay_out_in_tile<float>(rows, part, padded, tiles);
    } else {
      lay_out_in_tile<E>(rows, part, padded, tiles);
    }
    range.begin = part.end;
  }
}

// Rows [rows.begin, rows.end) times one panel; rows.begin is a multiple of a row tile's.
//
// Meanwhile fetches what lies ahead in the matrix; each pair of row tiles a part of it.
template <class E>
class PanelProduct {
 public:
  PanelProduct(const E* tiles, const Weight<E>& weight, const Output& out)
      : tiles_(tiles),
        weight_(weight),
        output_(weight.columns, weight.bias, out),
        padded_(round_up(weight.size, kChunk)),
        num_chunks_(static_cast<int>(padded_ / kChunk)) {}

  void run(Range rows, int64_t panel) const {
    const bool few = rows.end - rows.begin <= 2 * kTileRows;
    const int64_t ahead = few ? kFetchedAhead : kChunk * padded_ * static_cast<int64_t>(sizeof(E));
    const E* data = weight_.data + panel * kChunk * padded_;
    const auto chunk_at = [data](int i) { return data + i * kChunkSize; };
    alignas(64) float sums[2][kRowTileSize];
    const int num_pairs = static_cast<int>(round_up(rows.end - rows.begin, 2 * kTileRows) / (2 * kTileRows));
    for (int pair = 0; pair < num_pairs; pair++) {
      const int64_t m = rows.begin + pair * 2 * kTileRows;
      const Range lines = share(kChunkLines<E>, pair, num_pairs);
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

 private:
  const E* tiles_;
  const Weight<E>& weight_;
  PanelOutput<E> output_;
  int64_t padded_;
  int num_chunks_;
};

// Some of the rows, and where their results go.
template <class E>
Rows part_of(const Rows& rows, Range range) {
  const size_t element = rows.is_float ? sizeof(float) : sizeof(E);
  Rows part = rows;
  part.data = static_cast<const char*>(rows.data) + range.begin * rows.size * element;
  part.count = range.end - range.begin;
  return part;
}

template <class E>
Output part_of(const Output& out, const Weight<E>& weight, int64_t first_row) {
  const int64_t columns = out.epilogue == Epilogue::kSiluGate ? weight.columns / 2 : weight.columns;
  Output part = out;
  part.data = static_cast<char*>(out.data) + first_row * columns * (out.is_float ? sizeof(float) : sizeof(E));
  return part;
}

// At most a block of rows for each thread.
template <class E>
void multiply_blocks(const Rows& rows, const Weight<E>& weight, const Output& out, E* tiles, int num_threads) {
  const int64_t padded = round_up(rows.size, kChunk);
  // A single row tile may be shorter; of several, the last one is filled up with zeros.
  const int64_t laid_out = rows.count <= kTileRows ? rows.count : round_up(rows.count, kTileRows);
  const int64_t num_panels = round_up(weight.columns, kChunk) / kChunk;
  Shares panels((rows.count + kBlockRows - 1) / kBlockRows * num_panels, num_threads);
  parallel(num_threads, [&](int thread, int threads) {
    lay_out(rows, share(laid_out, thread, threads), padded, tiles);
    TileRegisters registers(static_cast<int>(std::min<int64_t>(rows.count, kTileRows)));
    const PanelProduct<E> product(tiles, weight, out);
    barrier();
    for (int64_t i = panels.next(thread); i >= 0; i = panels.next(thread)) {
      const int64_t first = i / num_panels * kBlockRows;
      product.run({first, std::min(first + kBlockRows, rows.count)}, i % num_panels);
    }
  });
}

}  // namespace

template <class E>
void linear(const Rows& rows, const Weight<E>& weight, const Output& out, int num_threads) {
  static thread_local Scratch tile_memory;
  const int64_t at_once = std::min(rows.count, num_threads * kBlockRows);
  E* tiles = tile_memory.get<E>(round_up(at_once, kTileRows) * round_up(rows.size, kChunk));
  for (int64_t first = 0; first < rows.count; first += at_once) {
    const Range range{first, std::min(first + at_once, rows.count)};
    multiply_blocks(part_of<E>(rows, range), weight, part_of(out, weight, first), tiles, num_threads);
  }
}

template <class E>
void pack(const E* weight, int64_t columns, int64_t size, E* packed, int num_threads) {
  const int64_t num_chunks = round_up(size, kChunk) / kChunk;
  const int64_t num_panels = round_up(columns, kChunk) / kChunk;
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_panels, thread, threads);
    for (int64_t panel = own.begin; panel < own.end; panel++) {
      E* target = packed + panel * num_chunks * kChunkSize;
      std::fill(target, target + num_chunks * kChunkSize, E{});
      const int64_t valid = std::min<int64_t>(kChunk, columns - panel * kChunk);
      for (int64_t column = 0; column < valid; column++) {
        const E* row = weight + (panel * kChunk + column) * size;
        for (int64_t k = 0; k < size; k++) {
          target[k / kChunk * kChunkSize + chunk_offset(target, k % kChunk, static_cast<int>(column))] = row[k];
        }
      }
    }
  });
}

template <class E>
void unpack_columns(const E* packed, int64_t size, const int64_t* ids, int64_t num_ids, float* out, int num_threads) {
  const int64_t padded = round_up(size, kChunk);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_ids, thread, threads);
    for (int64_t i = own.begin; i < own.end; i++) {
      const E* panel = packed + ids[i] / kChunk * kChunk * padded;
      const int column = static_cast<int>(ids[i] % kChunk);
      for (int64_t k = 0; k < size; k++) {
        out[i * size + k] = to_float(panel[k / kChunk * kChunkSize + chunk_offset(panel, k % kChunk, column)]);
      }
    }
  });
}

template void linear(const Rows&, const Weight<bf16>&, const Output&, int);
template void linear(const Rows&, const Weight<float>&, const Output&, int);
template void pack(const bf16*, int64_t, int64_t, bf16*, int);
template void pack(const float*, int64_t, int64_t, float*, int);
template void unpack_columns(const bf16*, int64_t, const int64_t*, int64_t, float*, int);
template void unpack_columns(const float*, int64_t, const int64_t*, int64_t, float*, int);

}  // namespace miniserve
