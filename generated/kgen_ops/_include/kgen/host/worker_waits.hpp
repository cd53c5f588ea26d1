// Barriers, clusters and warp exchanges: where the threads of a block wait for each other. Part of worker.hpp.
#pragma once

#include "worker.hpp"

namespace kgen {
namespace host {

inline void Worker::cluster_barrier() {
    if (!peers_) return;
    self()->state = State::at_cluster;
    ++in_cluster_;
    suspend();
}

// Returns the address in block `rank` of the cluster that corresponds to `shared`.
inline void* Worker::map_shared_rank(const void* shared, u32 rank) {
    const u32 blocks = peers_ ? job_->launch->reserved : 1;
    if (rank >= blocks) fault("block %u of a cluster that has %u", rank, blocks);
    if (!memory_.has(shared))
        fault("an address that is not in the block's dynamic shared memory: the host layer "
              "maps no other to the cluster's blocks");
    if (peers_ && !passed_cluster_barrier_)
        fault("shared memory of block %u of the cluster before a cluster barrier: the block "
              "need not have begun",
              rank);
    const Worker& there = peers_ ? *peers_[rank] : *this;
    return there.memory_.begin() + memory_.offset_of(shared);
}

inline void Worker::barrier(u32 id, u32 count) {
    Thread* me = self();
    Barrier& barrier = barrier_at(id, count);
    me->state = State::at_barrier;
    me->barrier_id = id;
    me->barrier_count = count;
    me->next_waiter = nullptr;
    (barrier.first ? barrier.last->next_waiter : barrier.first) = me;
    barrier.last = me;
    arrive(barrier);
    suspend();
}

inline void Worker::barrier_arrive(u32 id, u32 count) { arrive(barrier_at(id, count)); }

inline Barrier& Worker::barrier_at(u32 id, u32& count) {
    const u32 all = job_->block_threads;
    if (id >= kMaxBarriers) fault("barrier %u: there are %u", id, kMaxBarriers);
    if (count == 0) {
        count = all;
    } else if (count % kWarpSize != 0 || count >= all + kWarpSize) {
        fault("barrier %u for %u threads: want a multiple of %u up to the block's %u", id,
              count, kWarpSize, all);
    }
    if (count > all) count = all;  // the last warp of the block is not full
    Barrier& barrier = barriers_[id];
    if (barrier.arrived != 0 && barrier.expected != count)
        fault("barrier %u: this thread expects %u threads, an earlier one %u", id, count,
              barrier.expected);
    barrier.expected = count;
    return barrier;
}

inline void Worker::arrive(Barrier& barrier) {
    if (++barrier.arrived < barrier.expected) return;
    u32 n = 0;
    for (Thread* t = barrier.first; t; t = t->next_waiter) order_[n++] = t;
    barrier.arrived = 0;
    barrier.first = barrier.last = nullptr;
    if (job_->launch->seed && n) random_.order(job_->launch->seed, order_, n);
    for (u32 i = 0; i < n; ++i) {
        order_[i]->state = State::ready;
        ready_.push_back(order_[i]);
    }
}

inline void Worker::counter_arrive(int* counter) {
    ++*counter;
    if (!peers_ || job_->launch->seed % 2 == 0) return;
    // All threads of the block pause, also those that have not arrived: if a block arrives before it has made the
    // writes that it announces, the writes are still missing when other blocks read.
    Thread* me = self();
    ready_.push_front(me);
    rests_ = true;
    switch_context(me->context, main_, false);
}

inline void Worker::counter_wait(const int* counter, int value) {
    if (*counter >= value) return;
    Thread* me = self();
    me->state = State::at_counter;
    me->counter = counter;
    me->awaited = value;
    at_counter_.push_back(me);
    suspend();
}

inline bool Worker::can_resume() const {
    if (rests_) return true;
    for (const Thread* thread : at_counter_)
        if (*thread->counter >= thread->awaited) return true;
    return false;
}

inline u64 Worker::exchange(Exchange operation, u32 mask, u32 source, u64 value) {
    Thread* me = self();
    const u32 warp = me->rank / kWarpSize;
    const u32 lane = me->rank % kWarpSize;
    if (!(mask >> lane & 1))
        fault("%s with mask 0x%08x, which does not name the calling lane %u",
              name_of(operation), mask, lane);
    me->state = State::in_exchange;
    me->operation = operation;
    me->mask = mask;
    me->source = source;
    me->value = value;
    waiting_[warp] |= 1u << lane;

    const u32 wanted = mask & lanes_of_warp(warp);
    if ((waiting_[warp] & wanted) != wanted || !agree(warp, wanted, *me)) {
        suspend();
        return me->result;
    }
    complete(warp, wanted);
    waiting_[warp] &= ~wanted;
    Thread* lanes = &threads_[warp * kWarpSize];
    if (job_->launch->seed == 0) {
        // This warp continues first: its stacks are in the cache.
        for (u32 i = kWarpSize; i-- > 0;)
            if ((wanted >> i & 1) && i != lane) ready_.push_front(&lanes[i]);
        return me->result;
    }
    Thread* released[kWarpSize];
    u32 n = 0;
    for (u32 i = 0; i < kWarpSize; ++i)
        if (wanted >> i & 1) released[n++] = &lanes[i];
    random_.order(job_->launch->seed, released, n);
    if (job_->launch->seed == 1) {  // this warp first, as in the order by rank
        for (u32 i = n; i-- > 0;) ready_.push_front(released[i]);
        suspend();
        return me->result;
    }
    const bool first = random_.next() >> 63;
    for (u32 i = 0; i < n; ++i) {
        if (first)
            ready_.push_front(released[i]);
        else
            ready_.push_back(released[i]);
    }
    suspend();
    return me->result;
}

// Whether all lanes of `wanted`, which wait in some exchange, wait in the same one.
inline bool Worker::agree(u32 warp, u32 wanted, const Thread& me) const {
    const Thread* lanes = &threads_[warp * kWarpSize];
    for (u32 i = 0; i < kWarpSize; ++i)
        if ((wanted >> i & 1) &&
            (lanes[i].operation != me.operation || lanes[i].mask != me.mask))
            return false;
    return true;
}

inline void Worker::complete(u32 warp, u32 wanted) {
    Thread* lanes = &threads_[warp * kWarpSize];
    u32 set = 0;
    for (u32 i = 0; i < kWarpSize; ++i)
        if ((wanted >> i & 1) && lanes[i].value) set |= 1u << i;
    for (u32 i = 0; i < kWarpSize; ++i) {
        if (!(wanted >> i & 1)) continue;
        Thread& t = lanes[i];
        if (t.operation == Exchange::ballot)
            t.result = set;
        else
            t.result = wanted >> t.source & 1 ? lanes[t.source].value : ~0ull;
        t.state = State::ready;
    }
}

}  // namespace host
}  // namespace kgen
