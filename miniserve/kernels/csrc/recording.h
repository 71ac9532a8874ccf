// Calls of operators that are kept, to be made again without their checks of shapes, and without Python between them.
#pragma once

#include <cstdint>
#include <functional>

namespace miniserve {

// One call, told how many threads it may use. The memory that it points to must outlive the recording.
using KeptCall = std::function<void(int num_threads)>;

// From now on, calls of this thread are kept; nothing may be recorded yet.
void begin_recording();

// Ends that, and returns the recording's name.
int64_t end_recording();

bool is_recording();
void keep(KeptCall call);

// Makes all calls of a recording, in their order.
void replay(int64_t recording, int num_threads);

void forget(int64_t recording);

}  // namespace miniserve
