#include "recording.h"

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace miniserve {
namespace {

using Calls = std::vector<KeptCall>;

thread_local std::optional<Calls> current;

struct Recordings {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Calls>> by_name;
  int64_t last = 0;
};

Recordings& recordings() {
  static Recordings all;
  return all;
}

}  // namespace

void begin_recording() {
  if (current) throw std::logic_error("this thread is recording already");
  current.emplace();
}

int64_t end_recording() {
  if (!current) throw std::logic_error("this thread is not recording");
  auto calls = std::make_shared<const Calls>(std::move(*current));
  current.reset();
  Recordings& all = recordings();
  const std::lock_guard lock(all.mutex);
  all.by_name[++all.last] = std::move(calls);
  return all.last;
}

bool is_recording() { return current.has_value(); }

void keep(KeptCall call) { current->push_back(std::move(call)); }

void replay(int64_t recording, int num_threads) {
  std::shared_ptr<const Calls> calls;
  {
    Recordings& all = recordings();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_name.find(recording);
    if (found == all.by_name.end()) throw std::out_of_range("there is no recording " + std::to_string(recording));
    calls = found->second;
  }
  for (const KeptCall& call : *calls) call(num_threads);
}

void forget(int64_t recording) {
  Recordings& all = recordings();
  const std::lock_guard lock(all.mutex);
  all.by_name.erase(recording);
}

}  // namespace miniserve
