// Whether this is a build with AddressSanitizer: KGEN_ASAN.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define KGEN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KGEN_ASAN 1
#endif
#endif
#if defined(KGEN_ASAN)
#include <sanitizer/asan_interface.h>
#endif
