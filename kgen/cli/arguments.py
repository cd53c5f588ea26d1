"""Options that several commands share, and their parsing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from kgen.errors import ProblemError
from kgen.model.problem import Problem, parse_problem
from kgen.model.signature import Signature
from kgen.operators.base import Operator

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_common(
    parser: argparse.ArgumentParser, *, problems: bool, passes: bool, compiler: bool, seed: bool
) -> None:
    """Add the options that name what to work on."""
    parser.add_argument("--op", required=True, metavar="OP", help="operator; see 'kgen ops'")
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
    if seed:
        parser.add_argument(
            "--seed",
            type=int,
            default=0,
            metavar="S",
            help="of proposals and random inputs (default: %(default)s)",
        )


def duration(text: str) -> float:
    """Parse `90`, `60s`, `5m` or `1h` to seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no duration; examples: 90, 60s, 5m, 1h")
    return float(match[1]) * _SECONDS[match[2]]


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
