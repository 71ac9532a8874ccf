// Threads of one operator call: torch's own pool, so that its operators and ours never compete for the cores.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>

namespace miniserve {

struct Range {
  int64_t begin, end;
};

// The part of `total` units that is `thread`'s.
inline Range share(int64_t total, int thread, int num_threads) {
  return {total * thread / num_threads, total * (thread + 1) / num_threads};
}

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// A moment of a loop that waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that stay together from one parallel call to the next: the way into a region of OpenMP and out of it is long
// beside a small operator. They wait for one another by spinning, as whoever they wait for is about to come.
class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // Calls lead() on this thread. Until it returns, its parallel calls go to the same `num_threads` threads.
  template <class Lead>
  static void run(int num_threads, Lead lead) {
    if (num_threads == 1) return lead();
    std::optional<Team> team;
    std::exception_ptr failure;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
      team.emplace(omp_get_num_threads());
      own() = &*team;
      if (omp_get_thread_num() == 0) {
        failure = team->lead(lead);
      } else {
        team->follow(omp_get_thread_num());
      }
      own() = nullptr;
    }
    if (failure) std::rethrow_exception(failure);
  }

  // The team that this thread is in, or null.
  static Team*& own() {
    static thread_local Team* team = nullptr;
    return team;
  }

  // From the thread that leads: body(thread, num_threads) on all of them. It must not throw.
  template <class Body>
  void call(Body& body) {
    body_ = &body;
    job_ = [](void* data, int thread, int threads) noexcept { (*static_cast<Body*>(data))(thread, threads); };
    barrier();
    job_(body_, 0, size_);
    barrier();
  }

  void barrier() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; i++) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr int kSpins = 1 << 17;  // some ms; then whoever it waits for may need this core

  template <class Lead>
  std::exception_ptr lead(Lead& lead) {
    std::exception_ptr failure;
    try {
      lead();
    } catch (...) {
      failure = std::current_exception();
    }
    job_ = nullptr;
    barrier();
    return failure;
  }

  void follow(int thread) {
    for (;;) {
      barrier();
      if (!job_) return;
      job_(body_, thread, size_);
      barrier();
    }
  }

  int size_;
  void (*job_)(void*, int, int) noexcept = nullptr;  // null: it is over
  void* body_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// Calls body(thread, num_threads) on each of `num_threads` threads at once; inside, `barrier()` waits for all of them.
template <class Body>
void parallel(int num_threads, Body body) {
  if (Team* team = Team::own()) return team->call(body);
#pragma omp parallel num_threads(num_threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

inline void barrier() {
  if (Team* team = Team::own()) return team->barrier();
#pragma omp barrier
}

// Hands out `total` units of work. Each thread takes those of its own share, in order; who has none left takes the last
// ones of others. The cores of a busy or virtual machine are never equally fast, and everyone waits for the last.
class Shares {
 public:
  Shares(int64_t total, int num_threads) : num_threads_(num_threads), shares_(new Share[num_threads]) {
    for (int thread = 0; thread < num_threads; thread++) {
      const Range own = share(total, thread, num_threads);
      shares_[thread].left = encode(own);
    }
  }

  // The next unit for `thread`, or -1 when all are taken.
  int64_t next(int thread) {
    std::atomic<uint64_t>& own = shares_[thread].left;
    for (uint64_t seen = own; !is_empty(seen);) {
      const Range left = decode(seen);
      if (own.compare_exchange_weak(seen, encode({left.begin + 1, left.end}))) return left.begin;
    }
    for (int i = 1; i < num_threads_; i++) {
      std::atomic<uint64_t>& other = shares_[(thread + i) % num_threads_].left;
      for (uint64_t seen = other; !is_empty(seen);) {
        const Range left = decode(seen);
        if (other.compare_exchange_weak(seen, encode({left.begin, left.end - 1}))) return left.end - 1;
      }
    }
    return -1;
  }

 private:
  struct alignas(64) Share {  // a cache line each
    std::atomic<uint64_t> left;
  };

  static uint64_t encode(Range r) { return static_cast<uint64_t>(r.begin) << 32 | static_cast<uint64_t>(r.end); }
  static Range decode(uint64_t x) { return {static_cast<int64_t>(x >> 32), static_cast<int64_t>(x & 0xffffffff)}; }
  static bool is_empty(uint64_t x) { return x >> 32 >= (x & 0xffffffff); }

  int num_threads_;
  std::unique_ptr<Share[]> shares_;
};

// Memory that grows and is kept from call to call, aligned to cache lines.
class Scratch {
 public:
  template <class T>
  T* get(int64_t count) {
    const size_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    if (bytes > size_) {
      memory_.reset();
      size_ = bytes + bytes / 2;
      size_ = round_up(static_cast<int64_t>(size_), 64);
      memory_.reset(std::aligned_alloc(64, size_));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

}  // namespace miniserve
