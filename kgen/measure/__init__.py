"""One timing protocol for kernels, finalists and peers (docs/measurement.md)."""

from kgen.measure.clocks import ClockState, clocks, driver_version
from kgen.measure.compare import Comparison, compare
from kgen.measure.floor import floor_us, share
from kgen.measure.memory import cache_state, copy_bandwidth, flush_l2, sets_needed
from kgen.measure.stats import Contender, Interval, median_interval, paired_difference, rank
from kgen.measure.timing import BUDGETS, Budget, gave_up, measure

__all__ = [
    "BUDGETS",
    "Budget",
    "ClockState",
    "Comparison",
    "Contender",
    "Interval",
    "cache_state",
    "clocks",
    "compare",
    "copy_bandwidth",
    "driver_version",
    "floor_us",
    "flush_l2",
    "gave_up",
    "measure",
    "median_interval",
    "paired_difference",
    "rank",
    "sets_needed",
    "share",
]
