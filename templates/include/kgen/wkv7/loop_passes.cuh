// The loops over chunks of 16 steps that specialized_loop.cuh and its producers compute: their direction, which rows
// and scores they read, and which operands have a low bf16 term.
//
//                       x    z    p    q    c    first    second    chunks
//     ForwardOutputs    A    R    B    K    v             y         in time
//     ForwardSums       A         B    K    v    sa                 in time
//     ForwardStates     A         B    K    v                       in time; the state after them
//     BackwardSums      B    K    A    R    gy   gsa      gv        from the last to the first
//     ForwardSumStates, BackwardSumStates: the loops of ForwardSums and BackwardSums that store nothing but the state
//     after all chunks
//
// S is the state, or its gradient in backward loops (formulas: chunk_columns.cuh). All rows are those of
// halving_producer.cuh:
//
//     X = x S + (x q^T) c     first = inverse X     second = z S + (z q^T) c + (z p^T) first
//     S = diag(P) S + q^T c + p^T first
//
// Backward loops read the same rows, because the factors P_15 / P_j and P_j change places; their scores and their
// inverse are the transposes of the forward loops'. With quotients (ByQuotients) the rows are those of
// quotient_producer.cuh, and the state is multiplied by P at another point:
//
//     in time: S = diag(P) (S + q^T c + p^T first)          from the last: S = diag(P) S, before all products
//
// Low terms: a gradient sums over value features, and all terms of this sum contain values that were rounded once per
// key. With inputs of one sign such errors add up. Loops whose results are summed in this way therefore keep two terms
// of all rows that read or update a state, and of the operands of scores.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/recurrent/recurrence.cuh"

namespace kgen::wkv7 {

enum Row { kRowA, kRowR, kRowK, kRowB };
enum Score { kScoreAK, kScoreRB, kScoreRK };

// Chunks in the order of a loop.
template <Direction D>
struct ChunkOrder {
    static constexpr bool kBack = D == Direction::backward;
    int chunks;
    int last;  // steps of the chunk that is last in time

    KGEN_DEVICE explicit ChunkOrder(i64 steps)
        : chunks(static_cast<int>(ceil_div(steps, i64{16}))),
          last(static_cast<int>(steps - (i64{chunks} - 1) * 16)) {}

    // The first step of a chunk.
    KGEN_DEVICE i64 first(int chunk) const { return i64{kBack ? chunks - 1 - chunk : chunk} * 16; }
    // Whether the loop stores its state before it processes a chunk: every Steps steps, and backward also after the
    // last step.
    template <int Steps>
    KGEN_DEVICE bool is_checkpoint(int chunk) const {
        return kBack ? chunk == 0 || (first(chunk) + 16) % Steps == 0 : first(chunk) % Steps == 0;
    }
    // How many steps of a chunk exist; 0 beyond the last chunk of the loop.
    KGEN_DEVICE int left(int chunk) const {
        if (chunk >= chunks) return 0;
        return chunk == (kBack ? 0 : chunks - 1) ? last : 16;
    }
};

struct ForwardRoles {
    static constexpr auto kDirection = Direction::forward;
    static constexpr bool kKeepsState = false;  // whether steps beyond the sequence's end leave the state as it is
    static constexpr bool kQuotients = false, kConsumerScores = false, kReadsK = true;  // see ByQuotients
    static constexpr int kZStateTerms = 2;     // terms of the state that z reads
    static constexpr Row kX = kRowA, kZ = kRowR, kP = kRowB, kQ = kRowK;
    static constexpr Score kScoreXQ = kScoreAK, kScoreZP = kScoreRB, kScoreZQ = kScoreRK;
};

struct BackwardRoles {
    static constexpr auto kDirection = Direction::backward;
    static constexpr bool kKeepsState = true;
    static constexpr bool kQuotients = false, kConsumerScores = false, kReadsK = true;
    static constexpr int kZStateTerms = 2;
    static constexpr Row kX = kRowB, kZ = kRowK, kP = kRowA, kQ = kRowR;
    static constexpr Score kScoreXQ = kScoreRB, kScoreZP = kScoreAK, kScoreZQ = kScoreRK;
};

// y.
struct ForwardOutputs : ForwardRoles {
    static constexpr bool kFirst = false, kSecond = true;  // kFirst: and the states before all chunks
    static constexpr bool kReadsR = true;
    // Numbers of bf16 terms: of each tensor's rows; of the operands of scores, of the state that x reads, of X, and of
    // `first`.
    static constexpr int kTermsA = 1, kTermsR = 1, kTermsK = 1, kTermsB = 1;
    static constexpr int kLevelTerms = 1, kStateTerms = 1, kReadTerms = 1, kSumsTerms = 1;
};

// sa and the states before all chunks.
struct ForwardSums : ForwardRoles {
    static constexpr bool kFirst = true, kSecond = false;
    static constexpr bool kReadsR = false;
    static constexpr int kTermsA = 2, kTermsR = 0, kTermsK = 2, kTermsB = 2;
    static constexpr int kLevelTerms = 2, kStateTerms = 2, kReadTerms = 2, kSumsTerms = 2;
};

// The state after all chunks. The values that consumers round have low terms, so that a segment adds no error to those
// of its loop.
struct ForwardStates : ForwardRoles {
    static constexpr bool kFirst = false, kSecond = false;
    static constexpr bool kReadsR = false;
    static constexpr int kTermsA = 1, kTermsR = 0, kTermsK = 1, kTermsB = 1;
    static constexpr int kLevelTerms = 1, kStateTerms = 2, kReadTerms = 2, kSumsTerms = 2;
};

// gsa, gv and the gradients of the states after all chunks.
struct BackwardSums : BackwardRoles {
    static constexpr bool kFirst = true, kSecond = true;
    static constexpr bool kReadsR = true;
    static constexpr int kTermsA = 2, kTermsR = 2, kTermsK = 1, kTermsB = 2;  // gv alone reads K
    static constexpr int kLevelTerms = 2, kStateTerms = 2, kReadTerms = 2, kSumsTerms = 2;
};

// The states after all chunks, as accurate as the states that the loops of the backward pass store.
struct ForwardSumStates : ForwardSums {
    static constexpr bool kFirst = false, kKeepsState = true;
};
struct BackwardSumStates : BackwardSums {
    static constexpr bool kFirst = false, kSecond = false;
};

// The loop of a Pass with the rows of quotient_producer.cuh. Scores are products of these rows, so that R and K need
// low terms. With these terms y needs no low term of the state. Backward loops without outputs need neither K nor
// scores with K. ConsumerScores: whether consumers compute the scores instead of producers.
template <class Pass, bool ConsumerScores = false>
struct ByQuotients : Pass {
    static constexpr bool kQuotients = true, kConsumerScores = ConsumerScores;
    static constexpr bool kReadsK = Pass::kDirection == Direction::forward || Pass::kFirst;
    static constexpr int kTermsR = Pass::kReadsR ? 2 : 0, kTermsK = !kReadsK ? 0 : Pass::kReadsR ? 2 : Pass::kTermsK;
    static constexpr int kZStateTerms = Pass::kStateTerms;
};

// The number of terms of a tensor's rows.
template <class Pass, Row Which>
constexpr int kTermsOf = Which == kRowA   ? Pass::kTermsA
                         : Which == kRowR ? Pass::kTermsR
                         : Which == kRowK ? Pass::kTermsK
                                          : Pass::kTermsB;

}  // namespace kgen::wkv7
