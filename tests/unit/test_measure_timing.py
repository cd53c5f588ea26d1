"""The protocol on the host, with a clock that only the measured calls advance."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import pytest
import torch

from kgen.measure.clocks import clocks, read_clocks
from kgen.measure.compare import compare
from kgen.measure.sampler import make_sampler
from kgen.measure.timing import BUDGETS, Budget, gave_up, measure

CPU = torch.device("cpu")


class FakeClock:
    """Nanoseconds that pass only when a call says so."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def taking(self, us: Callable[[], float]) -> Callable[[], None]:
        """A call of the given duration."""

        def call() -> None:
            self.ns += round(us() * 1e3)

        return call


def test_steady_calls_stop_at_once() -> None:
    clock = FakeClock()
    timing = measure([clock.taking(lambda: 500.0)], CPU, BUDGETS["search"], clock=clock)
    assert timing.median_us == 500.0
    assert (timing.low_us, timing.high_us) == (500.0, 500.0)
    assert timing.samples == BUDGETS["search"].least
    assert timing.protocol == "host clock, loops of 1, 1 buffer set, median +-0 %"


def test_noisy_calls_are_sampled_until_the_median_is_settled() -> None:
    clock = FakeClock()
    rng = random.Random(3)
    call = clock.taking(lambda: 500.0 * (1 + 0.1 * rng.random()))
    rough = measure([call], CPU, Budget(1e6, 0.0, 0.02, 6), clock=clock)
    fine = measure([call], CPU, Budget(1e6, 0.0, 0.002, 6), clock=clock)
    assert 6 <= rough.samples < fine.samples < 5000
    reached = [float(t.protocol.rpartition("+-")[2].removesuffix(" %")) for t in (rough, fine)]
    assert 0 < reached[1] <= 0.2 < reached[0] <= 2
    assert fine.median_us == pytest.approx(525, rel=0.01)


def test_budget_ends_what_never_settles() -> None:
    clock = FakeClock()
    rng = random.Random(3)
    call = clock.taking(lambda: rng.uniform(100.0, 1900.0))
    timing = measure([call], CPU, Budget(50.0, 0.0, 1e-6, 6), clock=clock)
    assert 20 <= timing.samples <= 100
    assert ", budget used up before 0.0001 %, median +-" in timing.protocol
    assert clock.ns < 100e6


def test_median_ignores_an_outlier() -> None:
    clock = FakeClock()
    taken = iter([300.0] * 4 + [9000.0] + [300.0] * 1000)
    timing = measure(
        [clock.taking(lambda: next(taken))], CPU, Budget(50.0, 0.0, 0.01, 9), clock=clock
    )
    assert timing.median_us == 300.0


def test_gives_up_early_and_says_so() -> None:
    clock = FakeClock()
    calls = [0]

    def us() -> float:
        calls[0] += 1
        return 5000.0

    timing = measure([clock.taking(us)], CPU, BUDGETS["final"], give_up_above_us=100.0, clock=clock)
    assert gave_up(timing)
    assert timing.protocol.endswith("gave up above 100 us")
    assert timing.median_us == 5000.0
    assert calls[0] <= 5
    near = measure(
        [clock.taking(lambda: 110.0)], CPU, BUDGETS["final"], give_up_above_us=100.0, clock=clock
    )
    assert gave_up(near)
    good = measure(
        [clock.taking(lambda: 90.0)], CPU, BUDGETS["final"], give_up_above_us=100.0, clock=clock
    )
    assert not gave_up(good)


def test_what_is_beyond_hope_is_called_once() -> None:
    clock = FakeClock()
    taken: list[float] = []

    def slow() -> float:
        taken.append(157e3)
        return taken[-1]

    call = clock.taking(slow)
    timing = measure([call], CPU, BUDGETS["search"], give_up_above_us=4e3, clock=clock)
    assert gave_up(timing)
    assert (timing.median_us, timing.samples, len(taken)) == (157e3, 1, 1)
    taken.clear()  # within five times the limit a first call may be its own fault
    near = measure([call], CPU, BUDGETS["search"], give_up_above_us=4e4, clock=clock)
    assert gave_up(near)
    assert len(taken) > 1


def test_one_launch_that_exceeds_the_budget_is_sampled_once() -> None:
    clock = FakeClock()
    timing = measure([clock.taking(lambda: 3e6)], CPU, BUDGETS["search"], clock=clock)
    assert timing.samples == 1
    assert timing.median_us == 3e6


def test_short_calls_are_looped_over_all_sets() -> None:
    clock = FakeClock()
    seen = [0, 0, 0]

    def on_set(i: int) -> Callable[[], None]:
        def us() -> float:
            seen[i] += 1
            return 2.0

        return clock.taking(us)

    sampler = make_sampler([on_set(i) for i in range(3)], CPU, 0.0, clock=clock)
    assert sampler.protocol == "host clock, loops of 102, 3 buffer sets"
    before = list(seen)
    assert sampler.take(1) == [2.0]
    assert [b - a for a, b in zip(before, seen, strict=True)] == [34, 34, 34]


def test_warms_up_as_long_as_asked() -> None:
    clock = FakeClock()
    make_sampler([clock.taking(lambda: 100.0)], CPU, 20.0, clock=clock)
    assert 20e6 <= clock.ns <= 25e6


def test_warm_up_goes_on_until_estimates_agree() -> None:
    clock = FakeClock()
    times = iter([900.0 - 25 * i for i in range(24)])  # clocks that rise: 900 us down to 325
    sampler = make_sampler([clock.taking(lambda: next(times, 325.0))], CPU, 5.0, clock=clock)
    assert sampler.estimate_us == 325.0
    assert 12e6 < clock.ns < 25e6, "longer than asked, because no three estimates agreed"
    assert "settled" not in sampler.protocol


def test_warm_up_that_never_settles_is_bounded_and_said() -> None:
    clock = FakeClock()
    rng = random.Random(2)
    sampler = make_sampler([clock.taking(lambda: rng.uniform(500, 2000))], CPU, 5.0, clock=clock)
    assert 20e6 < clock.ns < 30e6
    assert sampler.protocol.endswith("; warm-up not settled")


def test_contenders_of_like_speed_get_samples_of_one_length() -> None:
    """An estimate that is off by a few per cent must not change what a sample costs besides."""
    clock = FakeClock()
    calls = {
        name: [clock.taking(lambda us=us: us)] * 7  # type: ignore[misc]
        for name, us in (("a", 2.9), ("b", 3.1), ("slow", 40.0))
    }
    found = compare(calls, CPU, rounds=7, warmup_ms=1.0, clock=clock)
    lengths = {name: t.protocol.split(",")[1] for name, t in found.timings.items()}
    assert lengths == {"a": " loops of 70", "b": " loops of 70", "slow": " loops of 7"}


def test_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="no calls given"):
        measure([], CPU, BUDGETS["search"])
    with pytest.raises(ValueError, match="nothing to compare: 0 candidates"):
        compare({}, CPU)


def test_compare_interleaves_in_a_seeded_random_order() -> None:
    clock = FakeClock()
    log: list[str] = []

    def candidate(name: str, us: float) -> list[Callable[[], None]]:
        def taken() -> float:
            log.append(name)
            return us

        return [clock.taking(taken)]

    def once(seed: int) -> tuple[tuple[str, ...], ...]:
        found = compare(
            {"a": candidate("a", 300.0), "b": candidate("b", 400.0), "c": candidate("c", 500.0)},
            CPU,
            rounds=20,
            seed=seed,
            warmup_ms=0.0,
            cache="cold L2",
            clock=clock,
        )
        flat = [name for order in found.order for name in order]
        assert log[-60:] == flat  # what is reported is what ran
        assert {name: t.median_us for name, t in found.timings.items()} == {
            "a": 300.0,
            "b": 400.0,
            "c": 500.0,
        }
        assert all(len(s) == 20 for s in found.samples.values())
        assert found.timings["a"].protocol.endswith(
            f"cold L2, interleaved over 20 rounds, seed {seed}, median +-0 %"
        )
        return found.order

    orders = once(5)
    assert orders == once(5)
    assert orders != once(6)
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 3


def test_compare_stops_at_its_budget() -> None:
    clock = FakeClock()
    found = compare(
        {"a": [clock.taking(lambda: 1000.0)]},
        CPU,
        rounds=100,
        budget_ms=10.0,
        warmup_ms=0.0,
        clock=clock,
    )
    assert found.timings["a"].samples == 10
    assert "interleaved over 10 rounds of 100, budget used up, seed 0" in (
        found.timings["a"].protocol
    )
    slow = compare(
        {"a": [clock.taking(lambda: 1e6)]},
        CPU,
        rounds=100,
        budget_ms=10.0,
        warmup_ms=0.0,
        clock=clock,
    )
    assert slow.timings["a"].samples == 7


def test_real_clock_on_the_host() -> None:
    data = torch.randn(1000)
    timing = measure([lambda: data.mul(2.0)], CPU, Budget(5.0, 0.5, 0.05, 6))
    assert 0 < timing.low_us <= timing.median_us <= timing.high_us


class FakeNvml:
    """Answers as NVML does: 0, and a number through the last argument."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.asked_for = b""

    def __getattr__(self, name: str) -> Callable[..., int]:
        answers = {
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 250_500,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
        }

        def answer(*args: object) -> int:
            if name == self.fails:
                return 3
            if name == "nvmlDeviceGetHandleByUUID":
                assert isinstance(args[0], bytes)
                self.asked_for = args[0]
                return 0
            value = answers.get(name)
            if name == "nvmlDeviceGetClockInfo":
                value = {1: 1755, 2: 3201}[int(str(args[1]))]
            holder: ctypes.c_uint = args[-1]._obj  # type: ignore[attr-defined]
            assert value is not None
            holder.value = value
            return 0

        return answer


def test_clock_state_is_read_through_nvml() -> None:
    library = FakeNvml()
    state = read_clocks(library, "0123-45")
    assert state is not None
    assert library.asked_for == b"GPU-0123-45"
    assert (state.sm_mhz, state.memory_mhz, state.sm_max_mhz) == (1755, 3201, 1980)
    assert (state.temperature_c, state.power_w) == (41, 250.5)
    assert state.throttle == ("power cap", "thermal, software")
    assert state.slowed


@pytest.mark.parametrize(
    "fails",
    [
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ],
)
def test_no_clock_state_where_nvml_refuses(fails: str) -> None:
    assert read_clocks(FakeNvml(fails), "GPU-1") is None


def test_the_host_has_no_clock_state() -> None:
    assert clocks(CPU) is None
