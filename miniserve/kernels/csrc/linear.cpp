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
      store(target + r * kChunk, inputs[r].at(k), inputs[r].at(k + kLanes));
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

// The sums of up to two row tiles, which are written while the next ones are multiplied: a few rows at a time, and not
// before the stores of whole tiles have reached the cache.
template <class E>
class Unwritten {
 public:
  explicit Unwritten(const PanelOutput<E>& output) : output_(output) {}

  // sums [rows.end - rows.begin][32], which are this object's until all are written.
  void set(float* sums, Range rows, int64_t panel) {
    sums_ = sums;
    rows_ = rows;
    panel_ = panel;
    waits_ = kWaits;
  }

  void write_some() {
    if (waits_ > 0) {
      waits_--;
    } else {
      write(std::min<int64_t>(kRowsAtOnce, rows_.end - rows_.begin));
    }
  }

  void write_all() { write(rows_.end - rows_.begin); }

 private:
  static constexpr int kWaits = 4, kRowsAtOnce = 8;

  void write(int64_t count) {
    if (count == 0) return;
    output_.write(sums_, rows_.begin, count, panel_);
    sums_ += count * kChunk;
    rows_.begin += count;
  }

  const PanelOutput<E>& output_;
  float* sums_ = nullptr;
  Range rows_{0, 0};
  int64_t panel_ = 0;
  int waits_ = 0;
};

// What is done beside a product: what lies ahead in the matrix is fetched, and sums of the last product are written.
template <class E>
struct Meanwhile {
  Fetch fetch;
  Unwritten<E>& unwritten;

  void half(const void* chunk, int which) const {
    fetch.half(chunk, which);
    if (kHasTiles<E> && which == 0) unwritten.write_some();
  }
};

// Rows [rows.begin, rows.end) times one panel; rows.begin is a multiple of a row tile's. Results are written by the time
// that the object ends.
//
// Meanwhile fetches what lies ahead in the matrix; each pair of row tiles a part of it.
template <class E>
class PanelProduct {
 public:
  PanelProduct(const E* tiles, const Weight<E>& weight, const Output& out)
      : tiles_(tiles),
        weight_(weight),
        output_(weight.columns, weight.bias, out),
        unwritten_(output_),
        padded_(round_up(weight.size, kChunk)),
        num_chunks_(static_cast<int>(padded_ / kChunk)) {}
  ~PanelProduct() { unwritten_.write_all(); }
  PanelProduct(const PanelProduct&) = delete;
  PanelProduct& operator=(const PanelProduct&) = delete;

  void run(Range rows, int64_t panel) {
    const bool few = rows.end - rows.begin <= 2 * kTileRows;
    const int64_t ahead = few ? kFetchedAhead : kChunk * padded_ * static_cast<int64_t>(sizeof(E));
    const E* data = weight_.data + panel * kChunk * padded_;
    const auto chunk_at = [data](int i) { return data + i * kChunkSize; };
    const int num_pairs = static_cast<int>(round_up(rows.end - rows.begin, 2 * kTileRows) / (2 * kTileRows));
    for (int pair = 0; pair < num_pairs; pair++) {
      const int64_t m = rows.begin + pair * 2 * kTileRows, count = std::min<int64_t>(2 * kTileRows, rows.end - m);
      const Range lines = share(kChunkLines<E>, pair, num_pairs);
      const Fetch fetch{ahead, static_cast<int>(lines.begin), static_cast<int>(lines.end)};
      const Meanwhile<E> meanwhile{fetch, unwritten_};
      const E* left = tiles_ + m * padded_;
      float* sums = sums_[buffer_];
      if (count > kTileRows) {
        multiply_two(left, left + kTileRows * padded_, num_chunks_, chunk_at, meanwhile, sums, sums + kRowTileSize);
      } else {
        multiply(left, static_cast<int>(count), num_chunks_, chunk_at, meanwhile, sums, kChunk);
      }
      unwritten_.write_all();
      unwritten_.set(sums, {m, m + count}, panel);
      buffer_ = 1 - buffer_;
    }
  }

 private:
  const E* tiles_;
  const Weight<E>& weight_;
  const PanelOutput<E> output_;
  Unwritten<E> unwritten_;
  int64_t padded_;
  int num_chunks_;
  alignas(64) float sums_[2][2 * kRowTileSize];
  int buffer_ = 0;
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
  const int64_t columns = out.epilogue == Epilogue::kGate ? weight.columns / 2 : weight.columns;
  Output part = out;
  part.data = static_cast<char*>(out.data) + first_row * columns * (out.is_float ? sizeof(float) : sizeof(E));
  return part;
}

// The fewest rows of its own that a thread goes through all panels with. Fewer are multiplied by all threads, each with
// panels of its own: reading a row tile that another core has written takes less time than all weights then.
constexpr int64_t kFewestOwnRows = 128;

// Rows that are multiplied by a panel one after the other.
int64_t block_rows(int64_t num_rows, int num_threads) {
  const int64_t own = round_up((num_rows + num_threads - 1) / num_threads, 2 * kTileRows);
  return own < kFewestOwnRows ? kBlockRows : std::min(own, kBlockRows);
}

// A matrix times row tiles, shared by the threads: each takes panels, for a block of rows at a time.
template <class E>
class SharedProduct {
 public:
  SharedProduct(const E* tiles, int64_t num_rows, const Weight<E>& weight, const Output& out, int num_threads)
      : tiles_(tiles),
        num_rows_(num_rows),
        weight_(weight),
        out_(out),
        num_panels_(round_up(weight.columns, kChunk) / kChunk),
        block_rows_(block_rows(num_rows, num_threads)),
        shares_((num_rows + block_rows_ - 1) / block_rows_ * num_panels_, num_threads) {}

  // The part of `thread`.
  void run(int thread) {
    PanelProduct<E> product(tiles_, weight_, out_);
    for (int64_t i = shares_.next(thread); i >= 0; i = shares_.next(thread)) {
      const int64_t first = i / num_panels_ * block_rows_;
      product.run({first, std::min(first + block_rows_, num_rows_)}, i % num_panels_);
    }
  }

 private:
  const E* tiles_;
  int64_t num_rows_;
  const Weight<E>& weight_;
  const Output& out_;
  int64_t num_panels_, block_rows_;
  Shares shares_;
};

// Row tiles of at most a block of rows for each thread.
template <class E>
E* tiles_for(int64_t num_rows, int64_t size, int num_threads, Scratch& memory) {
  return memory.get<E>(round_up(std::min(num_rows, num_threads * kBlockRows), kTileRows) * round_up(size, kChunk));
}

// Calls body(part of the rows, its first row) for a block of rows for each thread at a time.
template <class E, class Body>
void for_parts(const Rows& rows, int num_threads, Body body) {
  const int64_t at_once = num_threads * kBlockRows;
  for (int64_t first = 0; first < rows.count; first += at_once) {
    body(part_of<E>(rows, {first, std::min(first + at_once, rows.count)}), first);
  }
}

// Lays a thread's share of the rows out.
template <class E>
void lay_out_share(const Rows& rows, E* tiles, int thread, int num_threads) {
  // A single row tile may be shorter; of several, the last one is filled up with zeros.
  const int64_t laid_out = rows.count <= kTileRows ? rows.count : round_up(rows.count, kTileRows);
  lay_out(rows, share(laid_out, thread, num_threads), round_up(rows.size, kChunk), tiles);
}

TileRegisters registers_for(const Rows& rows) {
  return TileRegisters(static_cast<int>(std::min<int64_t>(rows.count, kTileRows)));
}

}  // namespace

template <class E>
void linear(const Rows& rows, const Weight<E>& weight, const Output& out, int num_threads) {
  static thread_local Scratch memory;
  E* tiles = tiles_for<E>(rows.count, rows.size, num_threads, memory);
  for_parts<E>(rows, num_threads, [&](const Rows& part, int64_t first) {
    const Output part_out = part_of(out, weight, first);
    SharedProduct<E> product(tiles, part.count, weight, part_out, num_threads);
    parallel(num_threads, [&](int thread, int threads) {
      const TileRegisters registers = registers_for(part);
      lay_out_share(part, tiles, thread, threads);
      barrier();
      product.run(thread);
    });
  });
}

template <class E>
void feed_forward(const Rows& rows, const Weight<E>& gate_up, const Weight<E>& down, Activation activation, float* out,
                  int num_threads) {
  static thread_local Scratch memory, gated_memory;
  E* tiles = tiles_for<E>(rows.count, rows.size, num_threads, memory);
  E* gated = tiles_for<E>(rows.count, down.size, num_threads, gated_memory);
  const Output to_tiles{gated, false, Epilogue::kGateTiles, activation};
  for_parts<E>(rows, num_threads, [&](const Rows& part, int64_t first) {
    const Output part_out{out + first * down.columns, true, Epilogue::kAdd};
    SharedProduct<E> gate_product(tiles, part.count, gate_up, to_tiles, num_threads);
    SharedProduct<E> down_product(gated, part.count, down, part_out, num_threads);
    parallel(num_threads, [&](int thread, int threads) {
      const TileRegisters registers = registers_for(part);
      lay_out_share(part, tiles, thread, threads);
      barrier();
      gate_product.run(thread);
      barrier();
      down_product.run(thread);
    });
  });
}

// Elements `from` [num_k] of one column, into its place in a chunk.
template <class E>
void pack_column(const E* from, int num_k, int column, E* chunk) {
  constexpr int step = sizeof(E) == 2 ? 2 : 1;  // k that lie side by side
  int k = 0;
  for (; k + step <= num_k; k += step) std::copy_n(from + k, step, chunk + chunk_offset(chunk, k, column));
  for (; k < num_k; k++) chunk[chunk_offset(chunk, k, column)] = from[k];
}

template <class E>
void pack(const E* weight, int64_t columns, int64_t size, E* packed, int num_threads) {
  constexpr int64_t at_once = 8 * kChunk;  // k of a column before the next one: long reads, and all written lines in L1
  const int64_t num_chunks = round_up(size, kChunk) / kChunk;
  const int64_t num_panels = round_up(columns, kChunk) / kChunk;
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_panels, thread, threads);
    for (int64_t panel = own.begin; panel < own.end; panel++) {
      E* target = packed + panel * num_chunks * kChunkSize;
      std::fill(target, target + num_chunks * kChunkSize, E{});
      const int64_t valid = std::min<int64_t>(kChunk, columns - panel * kChunk);
      for (int64_t first = 0; first < size; first += at_once) {
        for (int64_t column = 0; column < valid; column++) {
          const E* row = weight + (panel * kChunk + column) * size;
          for (int64_t k = first; k < std::min(first + at_once, size); k += kChunk) {
            const int num_k = static_cast<int>(std::min<int64_t>(kChunk, size - k));
            pack_column(row + k, num_k, static_cast<int>(column), target + k * kChunk);
          }
        }
      }
    }
  });
}

template <class E>
void unpack_columns(const E* packed, int64_t size, const int64_t* ids, int64_t num_ids, float scale, float* out,
                    int num_threads) {
  const int64_t padded = round_up(size, kChunk);
  parallel(num_threads, [&](int thread, int threads) {
    const Range own = share(num_ids, thread, threads);
    for (int64_t i = own.begin; i < own.end; i++) {
      const E* panel = packed + ids[i] / kChunk * kChunk * padded;
      const int column = static_cast<int>(ids[i] % kChunk);
      for (int64_t k = 0; k < size; k++) {
        out[i * size + k] = scale * to_float(panel[k / kChunk * kChunkSize + chunk_offset(panel, k % kChunk, column)]);
      }
    }
  });
}

template void linear(const Rows&, const Weight<bf16>&, const Output&, int);
template void linear(const Rows&, const Weight<float>&, const Output&, int);
template void feed_forward(const Rows&, const Weight<bf16>&, const Weight<bf16>&, Activation, float*, int);
template void feed_forward(const Rows&, const Weight<float>&, const Weight<float>&, Activation, float*, int);
template void pack(const bf16*, int64_t, int64_t, bf16*, int);
template void pack(const float*, int64_t, int64_t, float*, int);
template void unpack_columns(const bf16*, int64_t, const int64_t*, int64_t, float, float*, int);
template void unpack_columns(const float*, int64_t, const int64_t*, int64_t, float, float*, int);

}  // namespace miniserve
