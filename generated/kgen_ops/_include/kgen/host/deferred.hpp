// Declarations of the host layer for asynchronous work (wgmma) that is executed when it is waited for.
#pragma once

#include "runtime.hpp"

namespace kgen {
namespace host {

// A deferred operation; `what` is a copy of its arguments.
using Deferred = void (*)(const void* what);
// Records an operation with a copy of the `bytes` bytes at `what`. It is executed in defer_wait. `sums`: the `count`
// accumulators of the lane that the operation adds to. It is a fault if a product of another shape that adds to the
// same accumulators is in flight and no fence lies between the two.
void defer(Deferred run, const void* what, u32 bytes, const float* sums, u32 count);
// Orders the thread's writes to registers before its next operations. An operation without a fence is a fault.
void defer_fence();
// Returns where an operation reads `shared`. In half of the thread orders it reads the async proxy's view, which has
// only writes that a fence followed: a missing fence shows. In the others it reads the memory itself: a write that
// comes before the operation has read its operands shows.
const void* operand_of_deferred(const void* shared);
// Closes the group of the operations since the last commit.
void defer_commit();
// Executes all of this thread's groups but the newest `pending`.
void defer_wait(u32 pending);

}  // namespace host
}  // namespace kgen
