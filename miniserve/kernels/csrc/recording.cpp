#include "recording.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "threads.h"

namespace miniserve {
namespace {

struct Recording {
  Sizes largest;
  std::vector<KeptCall> calls;
};

thread_local std::optional<Recording> current;

struct Recordings {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Recording>> by_name;
  int64_t last = 0;
};

Recordings& recordings() {
  static Recordings all;
  return all;
}

std::shared_ptr<const Recording> find(int64_t name) {
  Recordings& all = recordings();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_name.find(name);
  if (found == all.by_name.end()) throw std::out_of_range("there is no recording " + std::to_string(name));
  return found->second;
}

bool is_within(int64_t size, int64_t largest) { return 0 < size && size <= largest; }

}  // namespace

void begin_recording(const Sizes& largest) {
  if (current) throw std::logic_error("this thread is recording already");
  current = Recording{largest, {}};
}

int64_t end_recording() {
  if (!current) throw std::logic_error("this thread is not recording");
  auto recording = std::make_shared<const Recording>(std::move(*current));
  current.reset();
  Recordings& all = recordings();
  const std::lock_guard lock(all.mutex);
  all.by_name[++all.last] = std::move(recording);
  return all.last;
}

bool is_recording() { return current.has_value(); }

void keep(const Sizes& sizes, KeptCall call) {
  const Sizes& largest = current->largest;
  if (sizes.num_tokens != largest.num_tokens ||
      (sizes.num_requests != 0 && sizes.num_requests != largest.num_requests)) {
    throw std::logic_error("a recording of " + std::to_string(largest.num_tokens) + " tokens cannot keep a call with " +
                           std::to_string(sizes.num_tokens));
  }
  current->calls.push_back(std::move(call));
}

void replay(int64_t name, const Sizes& sizes, int num_threads) {
  const std::shared_ptr<const Recording> recording = find(name);
  const Sizes& largest = recording->largest;
  if (!is_within(sizes.num_tokens, largest.num_tokens) || !is_within(sizes.num_requests, largest.num_requests)) {
    throw std::out_of_range("a recording of " + std::to_string(largest.num_tokens) + " tokens and " +
                            std::to_string(largest.num_requests) + " requests has no room for " +
                            std::to_string(sizes.num_tokens) + " and " + std::to_string(sizes.num_requests));
  }
  Team::run(num_threads, [&] {
    for (const KeptCall& call : recording->calls) call(sizes, num_threads);
  });
}

void forget(int64_t name) {
  Recordings& all = recordings();
  const std::lock_guard lock(all.mutex);
  all.by_name.erase(name);
}

}  // namespace miniserve
