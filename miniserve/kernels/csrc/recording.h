// Calls of operators that are kept, to be made again for other sizes, without checks of shapes and without Python between.
#pragma once

#include <cstdint>
#include <functional>

namespace miniserve {

// Of a step; the one thing that may differ from replay to replay, beside what memory holds.
struct Sizes {
  int64_t num_tokens;
  int64_t num_requests;  // 0: the operator knows tokens only
};

// One call. The memory that it points to has room for the largest sizes, and outlives the recording.
using KeptCall = std::function<void(const Sizes& sizes, int num_threads)>;

// From now on, calls of this thread are kept instead of made. `largest` are the sizes that they may be replayed with.
void begin_recording(const Sizes& largest);

// Ends that, and returns the recording's name.
int64_t end_recording();

bool is_recording();

// `sizes` are those that the call would be made with: they must be the largest.
void keep(const Sizes& sizes, KeptCall call);

// Makes all calls of a recording, in their order.
void replay(int64_t recording, const Sizes& sizes, int num_threads);

void forget(int64_t recording);

}  // namespace miniserve
