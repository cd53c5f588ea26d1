// The tensors of a loop over the chunks of a head's columns, and the same recurrence step by step, for sequences with a
// result that is not finite. The names are those of chunk_columns.cuh: c is v in forward loops, gy in backward loops.
//
// Shared memory of step_by_step: float state[K][Columns].
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/recurrent/recurrence.cuh"
#include "kgen/wkv7/naive.cuh"
#include "kgen/wkv7/scaled_states.cuh"

namespace kgen::wkv7 {

// State: dtype of checkpoints; StateSteps: steps from one checkpoint to the next.
template <class Value, class W, class State = float, int StateSteps = 16>
struct ColumnTensors {
    int width;         // number of the block's columns
    i64 steps, pitch;  // pitch: elements from row to row of a state
    StepPointer<Value> r, k, a, b, c;
    StepPointer<W> w;
    float c_factor, second_factor;
    State* checkpoints;   // the state before each StateSteps steps of the loop, [checkpoints, K, V], or null
    Rows<float> first;    // [steps, V], or null
    Rows<Value> second;
    float* scales = nullptr;  // of the checkpoints, where they have any: [checkpoints, V]

    // Computes the whole sequence once more, with a thread per column and the state in shared memory. Outputs: whether
    // the tensors certainly have outputs; if false, they may be those of `without_outputs`.
    template <Direction D, bool Second, int Keys, int Columns, DecayForm Form = DecayForm::clamp, bool Outputs = true>
    KGEN_DEVICE void step_by_step(const float* start, float* end) const {
        constexpr bool kBack = D == Direction::backward;
        const int column = thread_rank();
        if (column >= width) return;
        const ColumnInMemory state{dynamic_smem<float>() + column, Columns, Keys};
        for (i64 i = 0; i < Keys; ++i)
            state.at(i) = start != nullptr ? start[i * pitch + column] : 0.0f;
        for (i64 step = 0; step < steps; ++step) {
            const i64 t = time_of<D>(step, steps);
            const bool outset = kBack ? (t + 1) % StateSteps == 0 || step == 0 : t % StateSteps == 0;
            if constexpr (kScaled<State>) {
                if (outset && (Outputs || checkpoints != nullptr)) write_scaled(state, t / StateSteps, Keys, column);
            } else if (checkpoints != nullptr && outset) {
                for (i64 i = 0; i < Keys; ++i)
                    checkpoints[(t / StateSteps * Keys + i) * pitch + column] = from_float<State>(state.at(i));
            }
            const Value *r_t = at(r, t), *k_t = at(k, t), *a_t = at(a, t), *b_t = at(b, t);
            const W* w_t = w.first + t * w.stride;
            const float c_t = c_factor * to_float(at(c, t)[column]);
            if constexpr (kBack) state.add(r_t, c_t);
            const float sum = state.read(kBack ? b_t : a_t);
            float read = 0.0f;
            if constexpr (kBack) {
                read = state.read(k_t);
                state.template update<Form>(w_t, a_t, sum);
            } else {
                state.template update<Form>(w_t, b_t, sum, k_t, c_t);
                if constexpr (Second) read = state.read(r_t);
            }
            if (first.first != nullptr) first.at(t)[column] = sum;
            if constexpr (Second) second.at(t)[column] = from_float<Value>(second_factor * read);
        }
        if (end != nullptr)
            for (i64 i = 0; i < Keys; ++i) end[i * pitch + column] = state.at(i);
    }

    // Sends `second` of all steps to `rows`, and lets nothing else be stored.
    KGEN_DEVICE void without_outputs(const Rows<Value>& rows) {
        checkpoints = nullptr;
        first = {nullptr, 0, 0, 0};
        second = rows;
    }

    // Writes a column of a checkpoint, and its scale.
    KGEN_DEVICE void write_scaled(const ColumnInMemory& state, i64 number, i64 keys, int column) const {
        float largest = 0.0f;
        for (i64 i = 0; i < keys; ++i) largest = fmax(largest, finite_magnitude(state.at(i)));
        const StateScale scale(largest);
        scales[number * pitch + column] = scale.from_memory;
        for (i64 i = 0; i < keys; ++i)
            checkpoints[(number * keys + i) * pitch + column] = from_float<State>(state.at(i) * scale.to_memory);
    }

    static KGEN_DEVICE const Value* at(const StepPointer<Value>& rows, i64 t) {
        return rows.first + t * rows.stride;
    }
};

}  // namespace kgen::wkv7
