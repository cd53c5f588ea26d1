"""Options that several commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kgen.errors import ProblemError, StorageError, shortened
from kgen.model.names import read_problem
from kgen.model.population import Population
from kgen.model.problem import Problem
from kgen.model.record import COLD, WARM
from kgen.model.signature import Signature
from kgen.operators.base import Operator

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", re.ASCII)
_LONGEST_S = 366 * 86400.0
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG])(?:i?B)?", re.IGNORECASE | re.ASCII)
_BYTES = {"M": 1 << 20, "G": 1 << 30}
_MOST_DIGITS = 9  # largest number of digits of counts and device numbers
_LEAST_MEMORY = 256 << 20  # nvcc does not compile an empty kernel with less than 200 MB


def add_path(parser: argparse.ArgumentParser, what: str = "operators") -> None:
    """Add `--path`, which names the user's own folders."""
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help=f"folder with {what} of your own (repeatable; also KGEN_PATH)",
    )


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--out`, the folder of the library."""
    parser.add_argument(
        "--out", default="generated", metavar="DIR", help=f"{what} (default: %(default)s)"
    )


def add_population(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--population`."""
    parser.add_argument(
        "--population",
        metavar="NAME",
        help=f"{what}: a name of 'kgen populations', or the path of a file of your own",
    )


def add_common(
    parser: argparse.ArgumentParser,
    *,
    problems: bool,
    passes: bool,
    compiler: bool,
    seed: bool,
    operator: str | None = None,
    population: bool = False,
) -> None:
    """Add the options for operator, device, compiler and problems.

    Args:
        operator: The default of `--op`.
        population: Whether to add `--population` and `--calls`, which may replace `--op`.
    """
    text = f" (default: {operator})" if operator else ""
    if population:
        text = " (default with --population or --calls: all of their operators)"
    parser.add_argument(
        "--op",
        required=operator is None and not population,
        default=operator,
        metavar="OP",
        help=f"operator; see 'kgen ops'{text}",
    )
    parser.add_argument(
        "--gpu",
        default="auto",
        metavar="GPU",
        help="'auto' (the first CUDA GPU, else host), 'host' (the CPU), or a name that 'kgen gpus' "
        "lists (default: %(default)s)",
    )
    add_path(parser)
    if problems:
        parser.add_argument(
            "--problem",
            action="append",
            default=[],
            metavar="M=..,N=..,dtype=..",
            help="dims, dtypes and options of a problem, or its short name: 'M8192 N4096 bf16' "
            "(repeatable; default: the operator's default problems)",
        )
    if population:
        add_population(parser, "problems that published models call, in place of --problem")
        parser.add_argument(
            "--calls",
            metavar="FILE",
            help="problems that `kgen_ops.capture` recorded, the most expensive first, in place of "
            "--problem",
        )
    if passes:
        parser.add_argument(
            "--pass",
            dest="pass_name",
            default="all",
            choices=["forward", "backward", "all"],
            help="which pass (default: %(default)s)",
        )
    if compiler:
        parser.add_argument(
            "--compiler",
            choices=["nvrtc", "nvcc"],
            default="nvrtc",
            help="for CUDA GPUs; the host uses g++ or $CXX (default: %(default)s)",
        )
        add_compile_limits(parser)
    if seed:
        parser.add_argument(
            "--seed",
            type=seed_number,
            default=0,
            metavar="S",
            help="seed of proposals and random inputs (default: %(default)s)",
        )


def add_compile_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits of a compilation."""
    parser.add_argument(
        "--compile-timeout",
        type=duration,
        metavar="120s",
        help="a compilation that takes longer is killed and counts as failed: 90, 60s, 5m "
        "(default: 120s)",
    )
    parser.add_argument(
        "--compile-memory",
        type=memory_size,
        metavar="8G",
        help="a compilation that needs more memory fails: 8G, 512M "
        "(default: a quarter of the machine's, from 4G to 16G)",
    )


def add_l2(parser: argparse.ArgumentParser) -> None:
    """Add the option for the state of L2 while a kernel is timed."""
    parser.add_argument(
        "--l2",
        choices=[COLD, WARM],
        default=COLD,
        help="state of the L2 cache. cold: buffer sets rotate, so inputs come from memory; warm: "
        "one buffer set, for a kernel that runs right after the producer of its inputs (default: "
        "%(default)s)",
    )


def check_output(option: str, path: str | None) -> None:
    """Check before any work that a file can be written afterwards.

    Raises:
        StorageError: If the file cannot be written.
    """
    if not path:
        return
    target = Path(path)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is a folder" if target.is_dir() else f"cannot be written: see {folder}"
        raise StorageError(f"{option} {path}: {why}\n  next: name a file that you may write")


def seed_number(text: str) -> int:
    """Parse a seed: a whole number below 2**31."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 10 or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' is not a whole number from 0 to {2**31 - 1}"
        )
    return int(digits)


def duration(text: str) -> float:
    """Parse `90`, `60s`, `5m` or `1h` to seconds, at most a year."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' is not a duration; examples: 90, 60s, 5m, 1h"
        )
    return seconds


def memory_size(text: str) -> int:
    """Parse `8G`, `1.5G` or `512M` (powers of 1024) to bytes."""
    match = _SIZE.fullmatch(text.strip())
    amount = float(match[1]) * _BYTES[match[2].upper()] if match else 0.0
    size = int(min(amount, 2.0**62))
    if size < _LEAST_MEMORY:
        why = f"is below {_LEAST_MEMORY >> 20}M" if match else "is not a memory size"
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' {why}; examples: 8G, 1.5G, 512M"
        )
    return size


def chosen_passes(signature: Signature, pass_name: str) -> list[str]:
    """Resolve `--pass`; `all` means every pass that the operator has.

    Raises:
        ProblemError: If the operator lacks the pass.
    """
    if pass_name == "all":
        return [p.name for p in signature.passes]
    return [signature.pass_named(pass_name).name]


def population_problems(
    population: Population, operator: Operator, passes: Sequence[str]
) -> dict[str, tuple[Problem, ...]]:
    """The problems of a population or of captured calls, by pass; passes without problems are left
    out.

    Raises:
        ProblemError: If no pass has a problem.
    """
    found = {name: population.problems(operator.name, name) for name in passes}
    found = {name: problems for name, problems in found.items() if problems}
    if not found:
        raise ProblemError(
            f"'{population.name}' has no problems of {operator.name} "
            f"{' and '.join(passes)}\n  it has: {print_counts(population)}\n  next: choose --op "
            "and --pass among these"
        )
    return found


def print_counts(population: Population) -> str:
    """For instance `wkv6 forward 90, wkv6 backward 42`."""
    counts = Counter((entry.operator, entry.pass_name) for entry in population.entries)
    return ", ".join(f"{name} {pass_} {count}" for (name, pass_), count in counts.items())


def chosen_problems(
    operator: Operator, pass_name: str, texts: Sequence[str], on_host: bool
) -> tuple[Problem, ...]:
    """Parse `--problem`, or the operator's default problems for the pass and the device.

    Raises:
        ProblemError: If a problem is malformed or repeated.
    """
    chosen = texts or operator.default_problems(pass_name, on_host)
    problems = [read_problem(text, operator.signature) for text in chosen]
    for i, problem in enumerate(problems):
        if problem in problems[:i]:
            raise ProblemError(f"problem '{problem}' is given twice")
    return tuple(problems)


def names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' is not a list of names; separate names by commas"
        )
    return names


def devices(text: str) -> str | tuple[int, ...]:
    """Parse `all` or `0,1,...`."""
    if text == "all":
        return text
    numbers = [_whole_number(part.strip()) for part in text.split(",")]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' is neither 'all' nor a list of device numbers; example: 0,1"
        )
    return tuple(number for number in numbers if number is not None)


def count(text: str, least: int = 0) -> int:
    """Parse a whole number from `least` to 1e9."""
    value = _whole_number(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(
            f"'{shortened(text)}' is not a whole number >= {least} of at most {_MOST_DIGITS} digits"
        )
    return value


def positive(text: str) -> int:
    """Parse a whole number from 1 to 1e9."""
    return count(text, least=1)


def given_text(text: str) -> str:
    """Refuse an empty value, which mostly comes from a shell variable that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is empty; give a value, or leave it out")
    return text


def _whole_number(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None
