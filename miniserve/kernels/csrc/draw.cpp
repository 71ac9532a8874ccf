// Drawing tokens at random, by an exponential race: the winner is the token with the largest p / e, where e ~ Exp(1) is
// the token's own noise. It wins with probability p, and no sums over the vocabulary are needed for it.

#include "kernels.h"
#include "logit_row.h"
#include "threads.h"

namespace miniserve {
namespace {

// What is less likely than the most probable token by more than this, as a difference of logs, is never drawn: the noise
// is not that extreme. The exponential function ends there as well.
constexpr float kNever = 87.0f;

// A bijection of 32 bits in which each bit of the result depends on all of x; constants of Wellons' search, 2018.
inline Ints mix(Ints x) {
  x = (x ^ shift_right<16>(x)) * ints(0x7feb352d);
  x = (x ^ shift_right<15>(x)) * ints(0x846ca68b);
  return x ^ shift_right<16>(x);
}

// A row's noise: a function of its seed and the token's id only. `uniform_noise` in `sampling.py` is its twin.
class Noise {
 public:
  explicit Noise(uint64_t seed)
      : first_key_(ints(static_cast<uint32_t>(seed))),
        second_key_(mix(first_key_ + ints(0x9e3779b9)) ^ ints(static_cast<uint32_t>(seed >> 32))) {}

  // v in [2^-33, 1), uniform, for each token from `first`; e = -log(1 - v) is then exact for small v too.
  Vec uniform(int64_t first) const {
    static constexpr uint32_t kOrder[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints ids = ints(static_cast<uint32_t>(first)) + load(kOrder);
    const Ints x = mix(mix(ids ^ first_key_) ^ second_key_);
    return min((to_floats(x) + broadcast(0.5f)) * broadcast(0x1p-32f), broadcast(1.0f - 0x1p-24f));
  }

 private:
  Ints first_key_, second_key_;
};

// Weights are proportional to p; that of the most probable token is 1, and it is there from the start.
class Race {
 public:
  // Only weights of at least `least` take part.
  Race(uint64_t seed, int64_t likeliest, float least) : noise_(seed), least_(least), winner_(likeliest) {
    const int64_t first = likeliest / kLanes * kLanes;
    float v[kLanes];
    store(v, noise_.uniform(first));
    set_best(score(1.0f, v[likeliest - first]));
  }

  // e is never less than v, so weight / v bounds the score. Few tokens come close to the best one so far, and only for
  // these a logarithm is computed.
  void enter(int64_t first, Vec weights) {
    if (!bits(at_least(weights, broadcast(floor_)))) return;
    const Vec v = noise_.uniform(first);
    uint32_t left = bits(at_least(weights, max(v * broadcast(bound_), broadcast(least_))));
    if (!left) return;
    float weight[kLanes], noise[kLanes];
    store(weight, weights);
    store(noise, v);
    for (; left; left &= left - 1) {
      const int lane = std::countr_zero(left);
      const float own = score(weight[lane], noise[lane]);
      if (own > best_ || (own == best_ && first + lane < winner_)) {
        winner_ = first + lane;
        set_best(own);
      }
    }
  }

  int64_t winner() const { return winner_; }

 private:
  static float score(float weight, float v) { return weight / static_cast<float>(-std::log1p(-static_cast<double>(v))); }

  void set_best(float score) {
    best_ = score;
    bound_ = score * 0.999999f;  // so that rounding excludes nobody
    floor_ = std::max(bound_ * 0x1p-33f, least_);
  }

  Noise noise_;
  float least_;
  int64_t winner_;
  float best_, bound_, floor_;
};

// Sets the weights to 0 but for those of the first tokens of the row: as many as it takes for their amounts to reach
// `limit`. Those below `low` are not looked at.
template <class Amounts>
void keep_first(const float* x, int64_t size, float low, float largest, double limit, const Amounts& amounts,
                float* weights) {
  const Band band = search(x, size, low, largest, limit, amounts);
  std::vector<Element> elements = elements_between(x, size, band.low, band.high);
  std::sort(elements.begin(), elements.end(), comes_first);
  float least = band.high;
  size_t kept = 0;
  for (double before = band.above; kept < elements.size() && before < limit; kept++) {
    before += amounts.of(elements[kept].index);
    least = elements[kept].value;
  }
  for (; kept < elements.size(); kept++) weights[elements[kept].index] = 0.0f;  // also equals of the last one
  for_lanes(x, size, [&](int64_t first, Vec lanes) {
    store(weights + first, keep(at_least(lanes, broadcast(least)), load(weights + first)));
  });
}

int64_t draw_one(const float* x, int64_t size, int64_t likeliest, const Draw& draw) {
  const float largest = x[likeliest];
  if (draw.temperature == 0.0f || !std::isfinite(largest)) return likeliest;
  const float inverse = 1.0f / draw.temperature;
  const auto weights_of = [&](Vec lanes) { return exp((lanes - broadcast(largest)) * broadcast(inverse)); };
  Race race(draw.seed, likeliest, draw.min_p);
  const bool has_top_k = draw.top_k > 0 && draw.top_k < size, has_top_p = draw.top_p < 1.0f;
  if (!has_top_k && !has_top_p) {
    for_lanes(x, size, [&](int64_t first, Vec lanes) { race.enter(first, weights_of(lanes)); });
    return race.winner();
  }
  static thread_local Scratch memory;
  float* weights = memory.get<float>(round_up(size, kLanes));
  double total = sum_of(x, size, [&](int64_t first, Vec lanes) {
    const Vec own = weights_of(lanes);
    store(weights + first, own);
    return own;
  });
  const float low = largest - kNever * draw.temperature;
  if (has_top_k) {
    keep_first(x, size, low, largest, static_cast<double>(draw.top_k), Ones(), weights);
    if (has_top_p) total = sum_of(weights, round_up(size, kLanes), [](int64_t, Vec lanes) { return lanes; });
  }
  if (has_top_p) keep_first(x, size, low, largest, draw.top_p * total, Weights{weights}, weights);
  for_lanes(weights, round_up(size, kLanes), [&](int64_t first, Vec lanes) { race.enter(first, lanes); });
  return race.winner();
}

}  // namespace

void draw(const float* logits, int64_t num_rows, int64_t size, int64_t stride, const Draw* draws, int64_t* ids,
          int num_threads) {
  Shares rows(num_rows, num_threads);
  parallel(num_threads, [&](int thread, int) {
    for (int64_t row; (row = rows.next(thread)) >= 0;) {
      ids[row] = draw_one(logits + row * stride, size, ids[row], draws[row]);
    }
  });
}

}  // namespace miniserve
