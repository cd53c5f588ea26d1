// Scheduling of the blocks of a cluster, which run in turns on one OS thread. Part of runtime.cpp.
//
// Each block has its own worker. A turn ends when all threads of the block wait at the cluster barrier or have
// returned, when no thread can run before other blocks arrive at a counter, or after an arrival at a counter. There are
// no locks, and a seed gives the same order every time.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cluster.hpp"
#include "thread.hpp"
#include "worker.hpp"

namespace kgen {
namespace host {

// Runs clusters of a job.
class ClusterTurns {
public:
    // One worker per block.
    explicit ClusterTurns(std::vector<std::unique_ptr<Worker>> workers)
        : workers_(std::move(workers)), statics_(workers_.size()) {
        for (const auto& worker : workers_) peers_.push_back(worker.get());
    }

    std::vector<std::unique_ptr<Worker>> give_back() { return std::move(workers_); }

    // Runs clusters of `job` until none is left or one failed.
    void work(Job& job) {
        for (u32 rank = 0; rank < peers_.size(); ++rank)
            if (!peers_[rank]->join(job, peers_.data(), rank)) return;
        tls_ = ModuleTls::of_this_os_thread();
        while (!job.stop.load(std::memory_order_relaxed)) {
            const u64 turn =
                job.next_block.fetch_add(peers_.size(), std::memory_order_relaxed);
            if (turn >= job.blocks) break;
            run(job, job.block_of_turn(turn, peers_.size()));
            if (job.stop.load(std::memory_order_relaxed))
                for (Worker* worker : peers_) worker->abandon();
        }
        for (Worker* worker : peers_) worker->leave_cluster();
        current_thread = nullptr;
    }

private:
    // Runs the cluster whose first block is `first`.
    void run(Job& job, u64 first) {
        const u64 seed = job.launch->seed;
        random_.seed(seed * 0x9e3779b97f4a7c15ull + first);
        std::vector<u32> order;
        for (u32 rank = 0; rank < peers_.size(); ++rank) order.push_back(rank);
        for (u32 round = 0;; ++round) {
            if (seed)
                for (u64 i = order.size(); i > 1; --i)
                    std::swap(order[i - 1], order[((random_.next() >> 32) * i) >> 32]);
            u32 waiting = 0, at_barrier = 0, ran = 0;
            for (const Worker* worker : peers_) at_barrier += worker->waits_at_barrier() ? 1 : 0;
            const bool all = at_barrier == peers_.size();
            for (const u32 rank : order) {
                Worker& worker = *peers_[rank];
                if (round == 0) {
                    tls_.fill_unwritten(seed);
                } else if (all || worker.can_resume()) {
                    tls_.restore(statics_[rank]);
                } else {
                    waiting += worker.waits_for_cluster() ? 1 : 0;
                    continue;
                }
                ++ran;
                std::string problem = round == 0 ? worker.begin(first + rank) : worker.resume();
                if (!problem.empty()) return job.fail(first + rank, std::move(problem));
                tls_.save(statics_[rank]);
                waiting += worker.waits_for_cluster() ? 1 : 0;
            }
            if (waiting == 0) return;
            if (ran > 0) continue;
            if (job.launch->pdl == kEndAtWait) {
                for (Worker* worker : peers_) worker->end_early_block();
                return;
            }
            for (u32 rank = 0; rank < peers_.size(); ++rank)
                if (peers_[rank]->waits_for_cluster())
                    return job.fail(first + rank, peers_[rank]->describe_left_alone());
        }
    }

    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<Worker*> peers_;
    std::vector<std::vector<char>> statics_;  // static shared memory of each block
    ModuleTls tls_;
    Random random_;
};

}  // namespace host
}  // namespace kgen
