// Declarations of the host layer for asynchronous work (wgmma) that is executed when it is waited for.
#pragma once

#include "runtime.hpp"

namespace kgen {
namespace host {

// A deferred operation; `what` is a copy of its arguments.
using Deferred = void (*)(const void* what);
// Records an operation with a copy of the `bytes` bytes at `what`. It is executed in defer_wait. `sums` are the
// accumulators that it adds to, of a lane: a fault if a product of another shape in flight adds to them and no fence
// lies between.
void defer(Deferred run, const void* what, u32 bytes, const float* sums, u32 count);
// Orders the thread's writes to registers before its next operations. A fault without it.
void defer_fence();
// Where an operation reads shared memory: in half of the orders of threads the async proxy's view, which has what was
// written before a fence; in the others the memory itself, which shows a write that comes too early.
const void* operand_of_deferred(const void* shared);
// Closes the group of the operations since the last commit.
void defer_commit();
// Executes all of this thread's groups but the newest `pending`.
void defer_wait(u32 pending);

}  // namespace host
}  // namespace kgen
