"""Host time of calls: what is inside it, how many calls a round has, and the table."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from kgen.bench import CallTable, print_calls
from kgen.measure.call_cost import call_costs
from kgen.model.call_cost import CallCost

CPU = torch.device("cpu")


class Machine:
    """A clock that stands still but for what calls take, and a device that is waited for."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.order: list[str] = []

    def call(self, name: str, *took_us: float) -> Callable[[], None]:
        """A call that takes these times in turn, the last one from then on."""
        left = list(took_us)

        def work() -> None:
            assert not torch.is_grad_enabled()
            self.order.append(name)
            self.now_ns += round(1e3 * (left.pop(0) if len(left) > 1 else left[0]))

        return work

    def synchronize(self) -> None:
        self.order.append("wait")
        self.now_ns += 50_000_000  # of the device: no part of a call's cost

    def clock(self) -> int:
        return self.now_ns


def test_the_device_and_first_calls_are_not_of_a_calls_cost() -> None:
    machine = Machine()
    calls = {"quick": machine.call("quick", 900.0, 5.0), "slow": machine.call("slow", 2000.0)}
    quick, slow = call_costs(calls, CPU, machine.synchronize, rounds=3, clock=machine.clock)
    assert quick == CallCost("quick", 5.0, 5.0, 5.0, 50_005.0, 3, 200)
    assert slow == CallCost("slow", 2000.0, 2000.0, 2000.0, 52_000.0, 3, 4)
    # A round: one call that is not timed, a wait, the timed ones, a wait, one with its wait; then
    # the next contender.
    one_round = ["quick", "wait", *["quick"] * 200, "wait", "quick", "wait",
                 "slow", "wait", *["slow"] * 4, "wait", "slow", "wait"]
    assert machine.order[-3 * len(one_round):] == one_round * 3


def test_quartiles_are_of_rounds() -> None:
    machine = Machine()
    rounds = [time for i in range(1, 8) for time in [1000.0 * i] * 6]
    (found,) = call_costs(
        {"a": machine.call("a", *[1000.0] * 4, *rounds)}, CPU, machine.synchronize, rounds=7,
        clock=machine.clock,
    )
    assert (found.low_us, found.median_us, found.high_us) == (2000.0, 4000.0, 6000.0)


def test_garbage_is_collected_again_afterwards() -> None:
    seen: list[bool] = []
    machine = Machine()
    call_costs({"a": lambda: seen.append(gc.isenabled())}, CPU, machine.synchronize, rounds=1)
    assert not seen[-1]
    assert gc.isenabled()

    def broken() -> None:
        if not gc.isenabled():
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        call_costs({"a": broken}, CPU, machine.synchronize, rounds=1)
    assert gc.isenabled()


TABLE = CallTable(
    "forward", "M=64,N=4096,dtype=bf16", "compiled", 3.14159,
    (CallCost("kgen_ops", 5.0, 4.9, 5.25, 22.5, 41, 200),
     CallCost("eager", 12.5, 12.0, 13.0, 1040.0, 41, 80)),
    {"liger": "ImportError: no"},
)
PRINTED = """\
forward M=64,N=4096,dtype=bf16, a call without gradients
            host time         quartiles  over kgen_ops  until done
  kgen_ops       5 us  4.9 us - 5.25 us           1.00     22.5 us
  eager       12.5 us     12 us - 13 us           2.50     1.04 ms
  liger did not run: ImportError: no
  first call of kgen_ops: 3.14 ms
  compiled launcher, host clock, interleaved over 41 rounds of 80 to 200 calls
"""


def test_printed() -> None:
    assert print_calls(TABLE) == PRINTED
