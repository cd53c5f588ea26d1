"""Options that several commands share, and their parsing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from kgen.errors import ProblemError
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import COLD, WARM
from kgen.model.signature import Signature
from kgen.operators.base import Operator

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG])(?:i?B)?", re.IGNORECASE)
_BYTES = {"M": 1 << 20, "G": 1 << 30}
_LEAST_MEMORY = 256 << 20  # nvcc does not compile an empty kernel with less than 200 MB


def add_common(
    parser: argparse.ArgumentParser,
    *,
    problems: bool,
    passes: bool,
    compiler: bool,
    seed: bool,
    operator: str | None = None,
) -> None:
    """Add the options that name what to work on; `operator` is the default of `--op`."""
    text = f" (default: {operator})" if operator else ""
    parser.add_argument(
        "--op",
        required=operator is None,
        default=operator,
        metavar="OP",
        help=f"operator; see 'kgen ops'{text}",
    )
    parser.add_argument(
        "--gpu",
        default="auto",
        metavar="GPU",
        help="'auto' (first CUDA GPU, else host), 'host', or a profile's name; "
        "see 'kgen gpus' (default: %(default)s)",
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with operators of your own (repeatable; also KGEN_PATH)",
    )
    if problems:
        parser.add_argument(
            "--problem",
            action="append",
            default=[],
            metavar="M=..,N=..,dtype=..",
            help="repeatable (default: the operator's own problems)",
        )
    if passes:
        parser.add_argument(
            "--pass",
            dest="pass_name",
            default="all",
            choices=["forward", "backward", "all"],
            help="(default: %(default)s)",
        )
    if compiler:
        parser.add_argument(
            "--compiler",
            choices=["nvrtc", "nvcc"],
            default="nvrtc",
            help="for CUDA GPUs; the host uses g++ or $CXX (default: %(default)s)",
        )
        parser.add_argument(
            "--compile-timeout",
            type=duration,
            metavar="120s",
            help="a compilation that takes longer is ended and has failed: 90, 60s, 5m "
            "(default: 120s)",
        )
        parser.add_argument(
            "--compile-memory",
            type=memory_size,
            metavar="8G",
            help="the same of one that needs more memory: 8G, 512M "
            "(default: a quarter of the machine's, from 4G to 16G)",
        )
    if seed:
        parser.add_argument(
            "--seed",
            type=int,
            default=0,
            metavar="S",
            help="of proposals and random inputs (default: %(default)s)",
        )


def add_l2(parser: argparse.ArgumentParser) -> None:
    """Add the choice of what L2 holds while a kernel is timed."""
    parser.add_argument(
        "--l2",
        choices=[COLD, WARM],
        default=COLD,
        help="cold: buffers rotate, so that inputs come from memory; warm: one set of buffers, for "
        "kernels that follow their producer at once (default: %(default)s)",
    )


def duration(text: str) -> float:
    """Parse `90`, `60s`, `5m` or `1h` to seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no duration; examples: 90, 60s, 5m, 1h")
    return float(match[1]) * _SECONDS[match[2]]


def memory_size(text: str) -> int:
    """Parse `8G`, `1.5G` or `512M` (powers of 1024) to bytes."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _BYTES[match[2].upper()]) if match else 0
    if size < _LEAST_MEMORY:
        why = f"is below {_LEAST_MEMORY >> 20}M" if match else "is no size of memory"
        raise argparse.ArgumentTypeError(f"'{text}' {why}; examples: 8G, 1.5G, 512M")
    return size


def chosen_passes(signature: Signature, pass_name: str) -> list[str]:
    """Resolve `--pass`; `all` means every pass that the operator has.

    Raises:
        ProblemError: If the operator lacks the pass.
    """
    if pass_name == "all":
        return [p.name for p in signature.passes]
    return [signature.pass_named(pass_name).name]


def chosen_problems(
    operator: Operator, pass_name: str, texts: Sequence[str], on_host: bool
) -> tuple[Problem, ...]:
    """Parse `--problem`, or the operator's default problems for the pass and the device.

    Raises:
        ProblemError: If one is malformed, or repeated.
    """
    chosen = texts or operator.default_problems(pass_name, on_host)
    problems = [parse_problem(text, operator.signature) for text in chosen]
    for i, problem in enumerate(problems):
        if problem in problems[:i]:
            raise ProblemError(f"problem '{problem}' is given twice")
    return tuple(problems)
