"""Finds conditions of a kernel that no launch of its host run met, so that nothing tested them.

A kernel that is wrong only in rare calls has a condition for them, and certificates cannot have an
input set for every rare call. They can see, though, that a condition was never met. Many conditions
are rightly so: `threadIdx.x < 32 && n < N` where N is a multiple of 32, or a parameter that the
problem fixes. These do not depend on the values and extents of a call, so their operands have the
same ranges in every call. Nor can `row < M` be false if a plan has a block for each row: then the
largest row is one less than M in every call. A branch is untested if its comparison had one outcome
in all calls, although the ranges of its operands differ between calls, and it is no such bound.

A `switch` is a comparison with each of its cases. A case that no launch met is untested.

Only comparisons of numbers in the kernel's own code count, which includes the headers that have it
(`kgen.model.whole_source`): not those of pointers, which ask for an optional tensor, and not those
of the primitives that all kernels share. A comment at a condition says why no call meets it, or
none on the host: `// untested: WHY`.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import VerifyError
from kgen.model.artifact import Artifact
from kgen.model.source_text import bare_text
from kgen.model.space import Variant
from kgen.model.spread_source import Piece, pieces, source_of
from kgen.model.whole_source import Origin, origins
from kgen.runtime.cache import read_file

# Equal to `Comparison` in kgen/host/comparisons.cpp: the place, the least and largest values of
# both operands, the outcomes, the number of calls, whether the ranges vary, and whether it is no
# bound of an index.
_COMPARISON = struct.Struct("=Q4dIHBB")
_MANY_CALLS = 10  # of a host run; large problems have a few calls, each with its own branches
_EQUAL, _NUMBERS = 2, 7  # the bits of equality, and of all outcomes without NaN
_TEMPLATE = re.compile(r"<[\w:\s,*&]*>(?=\s*[({:])")
_SWITCH, _IS_NUMBER = "switch", ("__builtin_isnan", "__builtin_isfinite")  # without an operator
_WORD = re.compile(r"\b[A-Za-z_]\w*")
_REASON = re.compile(r"//.*\buntested: \S")
_OPERATOR = re.compile(
    r"[=!]=|(?<![-<>])[<>]=?(?![<>])|\b(?:switch|__builtin_is(?:nan|finite))\b(?=\s*\()"
)


@dataclass(frozen=True, slots=True)
class _Made:
    """A comparison over all calls; see `_COMPARISON`."""

    outcomes: int
    calls: int
    varies: int
    is_no_bound: int


@dataclass(frozen=True, slots=True)
class UntestedBranch:
    """A condition that was always true, or always false.

    Attributes:
        line: The line of the kernel's source, or of the header.
        text: The statement, or the parentheses of `if`, `for` or `while` with their keyword.
        header: The header, such as kgen/wkv/tensors.cuh; empty for the kernel's source.
    """

    line: int
    text: str
    header: str = ""

    def __str__(self) -> str:
        return f"{self.header} line {self.line}: {self.text}".lstrip()


def untested_branches(
    executable: Artifact, comparisons: Path, line_finder: str
) -> tuple[UntestedBranch, ...]:
    """The untested branches of a kernel, in the order of their lines.

    Args:
        executable: The sanitized build that ran.
        comparisons: The file that its launches left behind; see `run_job`.
        line_finder: Path of addr2line.
    Raises:
        VerifyError: If addr2line fails.
    """
    source = source_of(read_file(executable.path))
    if not source or not comparisons.exists():  # another compiler, or no launch
        return ()
    written = _COMPARISON.iter_unpack(comparisons.read_bytes())
    made = {place: _Made(*rest) for place, _, _, _, _, *rest in written}
    spread_lines = pieces(source)
    sites = _that_depend_on_calls(
        list(_lines(executable, made, line_finder)), made, spread_lines)
    origin_of = origins(source)
    source_lines = source.split("\n")
    branches = []
    for line, sides in sorted(_one_sided(sites, made, spread_lines, origin_of).items()):
        origin = origin_of[spread_lines[line - 1].line - 1]
        # A kernel may instantiate a header's template several times, for instance for its first
        # and its other chunks; it is enough that one of these tested the condition.
        if not (all(sides) if origin.file else any(sides)):
            continue
        if not _has_reason(source_lines, spread_lines, line):
            text = _text_of_statement(spread_lines, line)
            branches.append(UntestedBranch(origin.line, text, origin.file))
    return tuple(dict.fromkeys(branches))


def untested_fault(branches: Sequence[UntestedBranch], variant: Variant) -> str:
    """Why untested branches refuse a kernel; empty if it has none that its variant does not name.

    Args:
        branches: The untested branches of the kernel.
        variant: Its variant.
    """
    named = ["".join(condition.split()) for condition, _ in variant.untested]
    unnamed = [
        str(one)
        for one in branches
        if not any(condition in "".join(one.text.split()) for condition in named)
    ]
    if not unnamed:
        return ""
    listed = "\n    ".join(unnamed)
    return (
        "a condition depends on the inputs, but had the same result in every launch of the host "
        f"run, so nothing tested its other side:\n    {listed}\n"
        "  next: remove the condition; or give the operator inputs that meet it (`cases`); or, if "
        "no call can, say why in a comment there: `// untested: WHY`; or at "
        f"{variant.where}: `untested: {{\"CONDITION\": WHY}}`"
    )


def _that_depend_on_calls(
    sites: Sequence[tuple[int, int]], made: Mapping[int, _Made], spread_lines: Sequence[Piece]
) -> list[tuple[int, int]]:
    """The comparisons, as places and lines, whose operands may depend on a call.

    Those that only one of many calls made are among them: no other call shows whether their
    operands vary. But if a line has more comparisons than its statement has operators, it is
    compiled several times, and calls that made another of its comparisons show it.
    """
    calls = max((one.calls for one in made.values()), default=0)
    places = Counter(line for _, line in sites)
    often = {line for place, line in sites if made[place].calls > 1}
    found = []
    for place, line in sites:
        one = made[place]
        depends = bool(one.varies)
        if not depends and one.calls == 1 and calls >= _MANY_CALLS:
            operators = [o for _, piece in _statement_of(spread_lines, line)
                         for o in _operators_in(piece)]
            depends = line not in often or places[line] <= len(operators)
        if depends and one.is_no_bound:
            found.append((place, line))
    return found


def _one_sided(
    sites: Sequence[tuple[int, int]],
    made: Mapping[int, _Made],
    spread_lines: Sequence[Piece],
    origin_of: Sequence[Origin],
) -> dict[int, list[bool]]:
    """For each line, whether each of its comparisons was one-sided.

    `exponent = rises ? top : exponent` may have the comparison that `rises` is the result of, and
    each such statement a copy of it. So copies for one name count together.
    """
    lines = Counter(line for _, line in sites)
    operators = {line: _operators(spread_lines, line, lines) for line in lines}
    uses: dict[tuple[str, str | int], int] = {}
    for place, line in sites:
        if not operators[line]:
            use = _use_of(spread_lines, line, origin_of)
            uses[use] = uses.get(use, 0) | made[place].outcomes
    found: dict[int, list[bool]] = {}
    for place, line in sites:
        outcomes = made[place].outcomes
        if not operators[line]:
            outcomes = uses[_use_of(spread_lines, line, origin_of)]
        found.setdefault(line, []).append(_is_one_sided(outcomes, operators[line]))
    return found


def _is_one_sided(outcomes: int, operators: Sequence[str]) -> bool:
    """Whether a comparison with these outcomes was always true or always false."""
    if operators and all(operator in ("==", "!=", _SWITCH) for operator in operators):
        return not outcomes & _EQUAL or outcomes == _EQUAL
    if operators and all(operator in _IS_NUMBER for operator in operators):
        return outcomes.bit_count() < 2  # of x with itself, or of |x| with the largest number
    return (outcomes & _NUMBERS).bit_count() < 2  # beside NaN, all numbers were on one side


def _statement_of(spread_lines: Sequence[Piece], line: int) -> list[tuple[int, Piece]]:
    """The numbered lines of a line's statement."""
    start = spread_lines[line - 1].statement
    return [(n, piece) for n, piece in enumerate(spread_lines, 1) if piece.statement == start]


def _text_of_statement(spread_lines: Sequence[Piece], line: int) -> str:
    texts = [piece.text for _, piece in _statement_of(spread_lines, line)]
    return " ".join(bare_text("\n".join(texts)).split())


def _use_of(
    spread_lines: Sequence[Piece], line: int, origin_of: Sequence[Origin]
) -> tuple[str, str | int]:
    """A line's file, and the name that it ends with: of `y = rises ?` that is `rises`.

    The number of the line instead if it has no name.
    """
    words = _WORD.findall(bare_text(spread_lines[line - 1].text))
    return origin_of[spread_lines[line - 1].line - 1].file, words[-1] if words else line


def _has_reason(source_lines: Sequence[str], spread_lines: Sequence[Piece], line: int) -> bool:
    """Whether a line's statement, or a comment directly above it, has a comment `untested: WHY`.

    Args:
        source_lines: The source before it was spread.
        spread_lines: The spread source.
        line: The line of the spread source.
    """
    statement = (piece for _, piece in _statement_of(spread_lines, line))
    lines = [piece.line for piece in statement if bare_text(piece.text).strip()]
    first = min(lines)
    while first > 1 and source_lines[first - 2].lstrip().startswith("//"):
        first -= 1
    return any(_REASON.search(text) for text in source_lines[first - 1 : max(lines)])


def _operators(spread_lines: Sequence[Piece], line: int, lines: Counter[int]) -> list[str]:
    """The comparison operators that a comparison with a line of the spread source may have.

    It may have the line in which its statement begins, or in `a && b ? x : y` that of another
    operand. So if a line has more comparisons than operators, they may have those of its
    statement's lines that have no comparison.

    Args:
        spread_lines: The spread source.
        line: The line of the comparison.
        lines: The number of comparisons of each line.
    """
    operators = _operators_in(spread_lines[line - 1])
    if lines[line] <= len(operators):
        return operators
    for number, piece in _statement_of(spread_lines, line):
        if number not in lines:
            operators += _operators_in(piece)
    return operators


def _operators_in(piece: Piece) -> list[str]:
    return _OPERATOR.findall(_TEMPLATE.sub("", piece.text))


def _lines(
    executable: Artifact, places: Iterable[int], line_finder: str
) -> Iterator[tuple[int, int]]:
    """For each place of a comparison in the kernel's own source, its line of the spread source."""
    wanted = list(places)
    if not wanted:
        return
    # A place is behind the call; one byte before it belongs to the call.
    command = [line_finder, "--exe", executable.path, *(hex(place - 1) for place in wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VerifyError(f"{line_finder}: {error}") from None
    if done.returncode != 0:
        raise VerifyError(f"{line_finder}: exit status {done.returncode}: {done.stderr.strip()}")
    for place, text in zip(wanted, done.stdout.splitlines(), strict=True):
        file, _, line = text.partition(" ")[0].rpartition(":")
        if Path(file).name == f"{executable.key}.cu" and line.isdigit():
            yield place, int(line)
