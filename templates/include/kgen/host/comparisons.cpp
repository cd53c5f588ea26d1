// The comparisons of a kernel, over the launches of a host run: their outcomes, and the ranges of
// their operands.
//
// GCC calls the functions below before each comparison (-fsanitize-coverage=trace-cmp). A process
// makes the launches of one call, and then adds what it saw to the file that the environment
// variable KGEN_COMPARISONS names. `kgen.trial.untested` asks whether a comparison had one outcome
// in all calls, and whether its ranges differ between calls, that is, whether its operands depend
// on the inputs or extents. If the largest operands always differ by 1, an index was compared with
// the extent that it runs up to.
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

namespace {

// As in the file, in the machine's byte order; equal to _COMPARISON in kgen/trial/untested.py.
struct Comparison {
    uint64_t place;  // address behind the call; 0: the entry is free
    double least[2], largest[2];  // of either operand; 0 if it was always NaN
    uint32_t outcomes;            // bits: 1 less, 2 equal, 4 greater, 8 NaN
    uint16_t calls;               // that made the comparison
    uint8_t varies;               // whether two calls had different ranges
    uint8_t is_no_bound;          // whether the largest operands of a call did not differ by 1
};

constexpr size_t kEntries = 1 << 14;  // a kernel has some hundred comparisons

struct Entry {
    uint64_t place;
    uint64_t least[2], largest[2];  // complements of ranks, and ranks: both only grow from 0
    uint32_t outcomes;
};

Entry entries[kEntries];

// These functions run at every comparison: no call in them is watched or checked.
#define KGEN_UNCHECKED __attribute__((no_sanitize("address", "undefined"), optimize("O2")))
#define KGEN_INLINE __attribute__((always_inline)) inline

// The rank of a number among all numbers, above 0; -0 has that of 0.
KGEN_INLINE uint64_t rank_of(double value) {
    value += 0.0;
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

double number_of(uint64_t rank) {
    const uint64_t bits = rank >> 63 ? rank & ~(uint64_t{1} << 63) : ~rank;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// The entry of a place that has none yet, or not the first one of its hash.
KGEN_UNCHECKED __attribute__((noinline)) Entry* entry_behind(size_t at, uint64_t place) {
    for (size_t tried = 0; tried < kEntries; ++tried, at = (at + 1) % kEntries) {
        Entry* entry = &entries[at];
        uint64_t found = __atomic_load_n(&entry->place, __ATOMIC_RELAXED);
        // 0 is the initial range, so an entry is complete as soon as it has a place.
        if (found == 0 && __atomic_compare_exchange_n(&entry->place, &found, place, false,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return entry;
        if (found == place) return entry;
    }
    return nullptr;  // full: the comparison is ignored
}

// Threads race for an entry. They write it only while it grows, so hardly any update is lost.
template <class Operand>
KGEN_INLINE void add(const void* caller, Operand a, Operand b) {
    const uint64_t place = reinterpret_cast<uint64_t>(caller);  // the executable is never moved
    const size_t at = place * 0x9E3779B97F4A7C15u >> 50;
    static_assert(kEntries == size_t{1} << (64 - 50), "the hash has as many values");
    Entry* entry = &entries[at];
    if (__atomic_load_n(&entry->place, __ATOMIC_RELAXED) != place)
        entry = entry_behind(at, place);
    if (entry == nullptr) return;
    const uint32_t outcome = a < b ? 1 : a == b ? 2 : a > b ? 4 : 8;
    if ((entry->outcomes & outcome) == 0) entry->outcomes |= outcome;
    const double operands[2] = {static_cast<double>(a), static_cast<double>(b)};
    for (int i = 0; i < 2; ++i) {
        if (operands[i] != operands[i]) continue;
        const uint64_t rank = rank_of(operands[i]);
        if (~rank > entry->least[i]) entry->least[i] = ~rank;
        if (rank > entry->largest[i]) entry->largest[i] = rank;
    }
}

bool same_ranges(const Comparison& a, const Comparison& b) {
    return memcmp(a.least, b.least, sizeof(a.least)) == 0 &&
           memcmp(a.largest, b.largest, sizeof(a.largest)) == 0;
}

// An entry, as if its call were the only one.
Comparison of_one_call(const Entry& entry) {
    Comparison one{};
    one.place = entry.place;
    for (int i = 0; i < 2; ++i) {
        if (entry.largest[i] == 0) continue;
        one.least[i] = number_of(~entry.least[i]);
        one.largest[i] = number_of(entry.largest[i]);
    }
    one.outcomes = entry.outcomes;
    one.calls = 1;
    const double difference = one.largest[0] - one.largest[1];
    one.is_no_bound = difference != 1.0 && difference != -1.0;
    return one;
}

class Written {
public:
    explicit Written(const char* path) : file_(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
        if (file_ >= 0) flock(file_, LOCK_EX);  // launches of several processes end at once
    }
    ~Written() {
        if (file_ >= 0) close(file_);
    }

    void add_entries() {
        if (file_ < 0) return;
        static Comparison before[kEntries];
        const ssize_t bytes = pread(file_, before, sizeof(before), 0);
        const size_t count = bytes < 0 ? 0 : static_cast<size_t>(bytes) / sizeof(Comparison);
        size_t end = count;
        for (const Entry& entry : entries) {
            if (entry.place == 0) continue;
            const Comparison one = of_one_call(entry);
            size_t at = 0;
            while (at < count && before[at].place != one.place) ++at;
            if (at < count) {
                before[at].outcomes |= one.outcomes;
                before[at].calls += before[at].calls < UINT16_MAX;
                before[at].varies |= !same_ranges(before[at], one);
                before[at].is_no_bound |= one.is_no_bound;
            } else if (end < kEntries) {
                before[end++] = one;
            }
        }
        const size_t length = end * sizeof(Comparison);
        if (pwrite(file_, before, length, 0) != static_cast<ssize_t>(length)) _exit(1);
    }

private:
    int file_;
};

__attribute__((destructor)) void write_entries() {
    const char* path = getenv("KGEN_COMPARISONS");
    if (path != nullptr && *path != '\0') Written(path).add_entries();
}

}  // namespace

#define KGEN_TRACE(name, argument, operand)                                    \
    KGEN_UNCHECKED void __sanitizer_cov_trace_##name(argument a, argument b) { \
        add(__builtin_return_address(0), static_cast<operand>(a),              \
            static_cast<operand>(b));                                          \
    }

extern "C" {
KGEN_TRACE(cmp1, uint8_t, uint8_t)
KGEN_TRACE(cmp2, uint16_t, int16_t)
KGEN_TRACE(cmp4, uint32_t, int32_t)
KGEN_TRACE(cmp8, uint64_t, int64_t)
KGEN_TRACE(const_cmp1, uint8_t, uint8_t)
KGEN_TRACE(const_cmp2, uint16_t, int16_t)
KGEN_TRACE(const_cmp4, uint32_t, int32_t)
KGEN_TRACE(const_cmp8, uint64_t, int64_t)
KGEN_TRACE(cmpf, float, float)
KGEN_TRACE(cmpd, double, double)
void __sanitizer_cov_trace_switch(uint64_t, uint64_t*) {}
}
