"""The sequence of launches on one input set.

A library's user launches a kernel many times: on other values in the same memory, with a workspace
that an earlier launch or another kernel left behind. So a kernel is launched on the set's values,
on other values in the same buffers, and on the set's values again. In a certificate the very first
launch is on other values: a kernel that keeps what it computed from some addresses, and uses it
ever after, is then wrong on the set's values. Before each launch the outputs and workspaces are
filled with NaN, a large finite number of either sign, or zero; or they keep the contents that the
previous launch left. All launches on the set's own values must give the same bits.

Before one launch the buffers keep the results of a launch on the same values, except for a few
elements. This detects a kernel that checks some elements of the old results, finds them right, and
skips the rest: such a kernel would be fast while it is timed, and right in all other launches.

A launch that starts with the workspaces of a launch on the same values must leave the same bits
there. So a kernel cannot count its launches in a workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.check.buffers import Fill


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        own: Whether the inputs hold the set's own values; else they hold other ones.
        outputs: Contents of the outputs before the launch.
        workspaces: Contents of the workspaces before the launch.
    """

    own: bool
    outputs: Fill
    workspaces: Fill


_BEFORE = Step(False, Fill.LARGE, Fill.LARGE)
_ALONE = Step(True, Fill.NONFINITE, Fill.NONFINITE)
_FIRST = Step(True, Fill.LARGE, Fill.LARGE)
_OTHER = Step(False, Fill.LEFT, Fill.NONFINITE)
_AFTER_OTHER = Step(True, Fill.LEFT, Fill.LEFT)
_OTHER_AGAIN = Step(False, Fill.LEFT, Fill.ZERO)
# Compared with the oracle; an element that the kernel does not write is NaN.
_LAST = Step(True, Fill.NONFINITE, Fill.LEFT)
# Follows a launch on the same values and must give the same bits, so the comparison of one of them
# with the oracle covers both.
_SPOILED = Step(True, Fill.SPOILED, Fill.SPOILED)
# Starts with the workspaces of a launch on the same values, and with its outputs except for a few
# elements. It must leave the same bits in the workspaces (`kgen.check.scratch`). This detects a
# kernel that counts its launches there only if the outputs look like results.
_REPEATED = Step(True, Fill.SPOILED, Fill.LEFT)

_STEPS: dict[int, tuple[Step, ...]] = {
    1: (_ALONE,),
    3: (_FIRST, _OTHER, _AFTER_OTHER, _LAST),
    # A host run changes the order of threads from launch to launch and has four orders. So the four
    # launches on the set's own values (indices 1, 3, 4 and 6) each have a different order; indices
    # 7 and 8 repeat the last two.
    4: (
        _BEFORE,
        _FIRST,
        _OTHER,
        _AFTER_OTHER,
        Step(True, Fill.ZERO, Fill.LEFT),
        _OTHER_AGAIN,
        _LAST,
        _REPEATED,
        _SPOILED,
    ),
    5: (
        _BEFORE,
        _FIRST,
        _OTHER,
        _AFTER_OTHER,
        Step(True, Fill.ZERO, Fill.LEFT),
        _OTHER_AGAIN,
        Step(True, Fill.NEGATIVE, Fill.LEFT),
        Step(True, Fill.NONFINITE, Fill.NEGATIVE),
        _REPEATED,
        _SPOILED,
    ),
}


def steps_of(launches: int) -> tuple[Step, ...]:
    """Return the launches of an input set.

    Args:
        launches: Launches on the set's own values, without those that repeat a launch on its own
            results; 1 or 3 to 5. A single launch starts from NaN.
    """
    return _STEPS[launches]
