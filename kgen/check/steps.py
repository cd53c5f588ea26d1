"""The launches that one input set is tried with.

A library's user launches a kernel again and again: on other values in the same memory, with a
workspace that an earlier launch or another kernel left behind. So a kernel is launched on the
set's values, on other values in the same buffers, and on the set's values again. Before each
launch the outputs and the workspaces are filled: with NaN, a large finite number of either sign or
zero; or they keep what the launch before left. All launches on the set's own values must give the
same bits. Before one launch they keep what a launch on the same values left, but for a few
elements, which hold something else: a kernel that looks at some of what is there, finds it right,
and leaves the rest undone would be fast as long as it is timed, and right in every other launch.

A launch that finds in the workspaces what a launch on the same values left there must leave the
same bits. So a kernel cannot count its launches in a workspace, whatever it counts them for.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.check.buffers import Fill


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        own: Whether the inputs hold the set's values; else they hold other ones.
        outputs: What the outputs hold before it.
        workspaces: What the workspaces hold before it.
    """

    own: bool
    outputs: Fill
    workspaces: Fill


_ALONE = Step(True, Fill.NONFINITE, Fill.NONFINITE)
_FIRST = Step(True, Fill.LARGE, Fill.LARGE)
_OTHER = Step(False, Fill.LEFT, Fill.NONFINITE)
_AFTER_OTHER = Step(True, Fill.LEFT, Fill.LEFT)
_OTHER_AGAIN = Step(False, Fill.LEFT, Fill.ZERO)
# Compared with the oracle: an element that nobody writes shows as NaN.
_LAST = Step(True, Fill.NONFINITE, Fill.LEFT)
# Follows a launch on the same values. Its bits must be the same, so that the comparison with the
# oracle is of both.
_SPOILED = Step(True, Fill.SPOILED, Fill.SPOILED)
# Finds what a launch on the same values left in the workspaces, and in the outputs but for a few
# elements: it must leave the same in the workspaces (`kgen.check.check`). A kernel that counts its
# launches there, and only where the outputs look like results, does not.
_REPEATED = Step(True, Fill.SPOILED, Fill.LEFT)

_STEPS: dict[int, tuple[Step, ...]] = {
    1: (_ALONE,),
    3: (_FIRST, _OTHER, _AFTER_OTHER, _LAST),
    # With four orders of threads, one launch after the other, the four launches on the set's own
    # values (numbers 0, 2, 3 and 5) have one order each; numbers 6 and 7 have the last
    # two once more.
    4: (
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
        launches: Those on the set's own values that begin from filled memory, 1 or 3 to 5. A single
            launch starts from NaN.
    """
    return _STEPS[launches]
