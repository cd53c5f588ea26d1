// What a kernel compiled for the host sees of work that is done once it is waited for: declarations.
#pragma once

#include "runtime.hpp"

namespace kgen {
namespace host {

// `run` gets a copy of the `bytes` bytes at `what` in defer_wait, and nobody may count on it before.
using Deferred = void (*)(const void* what);
void defer(Deferred run, const void* what, u32 bytes);
void defer_commit();
// Do all of this thread's groups but the newest `pending`.
void defer_wait(u32 pending);

}  // namespace host
}  // namespace kgen
