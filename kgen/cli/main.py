"""The parser, and the one place where errors become messages and exit codes.

Commands are imported when they run: `kgen --help` and `kgen ops` load neither torch nor Optuna.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from kgen import __version__
from kgen.cli.arguments import add_common, add_l2, duration, memory_size
from kgen.errors import KgenError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: done. 1: something failed. 2: the user's mistake. 130: interrupted.
    """
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    # The search factors matrices of a few hundred rows. On 16 cores OpenBLAS's threads made a
    # proposal five times as slow and took the cores that compile. It reads this when numpy loads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    name = options.command.replace("-", "_")
    command = importlib.import_module(f"kgen.cli.{name}_command")
    try:
        return int(command.run(options))
    except KgenError as problem:
        _complain(f"{type(problem).__name__}: {problem}")
        return problem.exit_code
    except KeyboardInterrupt:
        _complain("interrupted; what was verified is in the journal, the same command resumes")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `kgen report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        _complain(
            f"{problem.filename or ''}: {problem.strerror or problem}\n"
            "  check permissions and free space"
        )
        return EXIT_FAILURE


def _complain(text: str) -> None:
    print(f"\nkgen: {text}" if sys.stderr.isatty() else f"kgen: {text}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kgen",
        description="Autotune CUDA kernels per GPU and shape; verified before they are timed.",
        epilog="Start with: kgen tune --op wkv6 --gpu auto",
    )
    parser.add_argument("--version", action="version", version=f"kgen {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    tune = commands.add_parser("tune", help="search, verify and emit the best kernels")
    add_common(tune, problems=True, passes=True, compiler=True, seed=True)
    tune.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="trials per problem, at most, known ones included (default: 160; 12 on the host); the "
        "first ones of a variant that is new come on top",
    )
    tune.add_argument(
        "--time",
        type=duration,
        metavar="60s",
        help="time for all searches together: 90, 60s, 5m, 1h (default: no limit)",
    )
    tune.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is written (default: %(default)s)",
    )
    add_l2(tune)
    tune.add_argument(
        "--trial-timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="a trial that takes longer is ended and recorded (default: 30s)",
    )
    tune.add_argument(
        "--device-memory",
        type=memory_size,
        metavar="SIZE",
        help="device memory that trials may use: 512M, 20G (default: all)",
    )
    tune.add_argument(
        "--retry",
        action="store_true",
        help="try again what earlier tunes saw crash or run out of time",
    )
    tune.add_argument(
        "--no-peers",
        action="store_true",
        help="do not time eager PyTorch and torch.compile beside the winner",
    )

    _add_learn(commands.add_parser(
        "learn", help="learn which row serves a problem that was not tuned"
    ))

    verify = commands.add_parser("verify", help="check kernels against the float64 definition")
    add_common(verify, problems=True, passes=True, compiler=True, seed=True)
    verify.add_argument(
        "--sanitize",
        action="store_true",
        help="run the kernels under compute-sanitizer's memcheck and racecheck, too "
        "(with --gpu host: under AddressSanitizer)",
    )
    verify.add_argument("--record", metavar="ID", help="check the config of one record again")
    verify.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the records are (default: %(default)s)",
    )

    bench = commands.add_parser("bench", help="time tuned kernels beside their peers")
    add_common(bench, problems=True, passes=True, compiler=True, seed=True)
    subject = bench.add_mutually_exclusive_group()
    subject.add_argument(
        "--against",
        type=_names,
        metavar="NAME,...",
        help="only these peers: eager, torch.compile, ... (default: all that are installed)",
    )
    subject.add_argument(
        "--ladder",
        action="store_true",
        help="time the steps of the operator's published table instead",
    )
    bench.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the tuned library is (default: %(default)s)",
    )
    bench.add_argument("--yaml", metavar="FILE", help="write everything down; see docs/bench.md")
    bench.add_argument(
        "--profile",
        action="store_true",
        help="run all under torch.profiler instead: end-to-end time, largest kernel, a trace",
    )
    bench.add_argument(
        "--call-cost",
        action="store_true",
        help="time what a call costs the host instead: kgen_ops beside the peers; without "
        "--problem on the operator's smallest",
    )
    bench.add_argument(
        "--trace",
        metavar="FILE",
        help="where --profile keeps the trace (default: OP-GPU.pt.trace.json)",
    )
    check = commands.add_parser(
        "measure-check", help="how well measurements on this machine agree with themselves"
    )
    _add_measure_check(check)

    report = commands.add_parser("report", help="print the reports of earlier tunes")
    report.add_argument("--op", metavar="OP", help="only this operator")
    report.add_argument("--gpu", metavar="GPU", help="only this GPU")
    report.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )

    _add_package(commands.add_parser("package", help="write a wheel of the tuned library"))
    _add_explain(commands.add_parser("explain", help="which kernel serves a problem, and why"))

    renew = commands.add_parser(
        "emit", help="write the library again from its tables: after a merge, or with a newer kgen"
    )
    renew.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )
    operators = commands.add_parser("ops", help="list operators, passes and variants")
    for command in (renew, operators):
        command.add_argument(
            "--path",
            action="append",
            default=[],
            metavar="DIR",
            help="folder with operators of your own (repeatable; also KGEN_PATH)",
        )
    commands.add_parser("gpus", help="list GPU profiles")
    commands.add_parser("doctor", help="show what is installed, what works, what is missing")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of names; example: eager,liger")
    return names


def _add_learn(learn: argparse.ArgumentParser) -> None:
    add_common(learn, problems=True, passes=True, compiler=True, seed=True)
    add_l2(learn)
    learn.add_argument(
        "--only",
        default="",
        metavar="N=..,dtype=..",
        help="only rules of problems that have these (default: all; rules of others stay)",
    )
    learn.add_argument(
        "--points",
        type=_positive,
        default=12,
        metavar="N",
        help="problems per rule to measure all candidates on, the tuned ones included "
        "(default: %(default)s)",
    )
    learn.add_argument(
        "--time",
        type=duration,
        metavar="60s",
        help="time for all this together, without --held-out: 90, 60s, 5m (default: no limit)",
    )
    learn.add_argument(
        "--searches",
        type=_count,
        default=1,
        metavar="N",
        help="per rule, short searches of problems far from the tuned ones; the best that they "
        "find are candidates, too (default: %(default)s)",
    )
    learn.add_argument(
        "--search-time",
        type=duration,
        default=6.0,
        metavar="6s",
        help="time for each search (default: 6s)",
    )
    learn.add_argument(
        "--held-out",
        type=_count,
        default=0,
        metavar="N",
        help="then search N other problems of each pass, and time the rule's choice beside what "
        "was found (default: %(default)s)",
    )
    learn.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="trials of each such search, at most (default: 160; 12 on the host)",
    )
    learn.add_argument(
        "--trial-timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="a trial that takes longer is ended and recorded (default: 30s)",
    )
    learn.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the tuned library is (default: %(default)s)",
    )


def _add_measure_check(check: argparse.ArgumentParser) -> None:
    add_common(check, problems=True, passes=True, compiler=True, seed=True, operator="rmsnorm")
    add_l2(check)
    check.add_argument(
        "--tunes",
        type=_positive,
        default=3,
        metavar="T",
        help="independent tunes whose winners are compared; 1 compares none (default: %(default)s)",
    )
    check.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="trials per problem and tune, at most (default: 160; 12 on the host)",
    )
    check.add_argument(
        "--runs",
        type=_positive,
        default=5,
        metavar="R",
        help="repeated comparisons of a kernel with itself, each in a fresh process (default: "
        "%(default)s)",
    )
    check.add_argument("--yaml", metavar="FILE", help="write the result to a file, too")
    check.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    check.set_defaults(out="generated")


def _add_package(package: argparse.ArgumentParser) -> None:
    package.add_argument(
        "--arch",
        type=_names,
        default=(),
        metavar="sm_80,sm_90a,...",
        help="architectures that the wheel has cubins for; the others compile at the first call "
        "(default: those of the GPUs that the library was tuned for)",
    )
    package.add_argument(
        "--wheel",
        required=True,
        metavar="DIR",
        help="where the wheel is written",
    )
    _add_source(package)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("--op", required=True, metavar="OP", help="operator of the library")
    explain.add_argument(
        "--problem", required=True, metavar="M=..,N=..,dtype=..", help="dims, dtypes and options"
    )
    explain.add_argument(
        "--pass",
        dest="pass_name",
        default="forward",
        choices=["forward", "backward"],
        help="(default: %(default)s)",
    )
    explain.add_argument(
        "--gpu",
        default="auto",
        metavar="GPU",
        help="'auto' (the current CUDA GPU, else the CPU), or a GPU that the operator was tuned "
        "for, which need not be in this machine (default: %(default)s)",
    )
    _add_source(explain)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number >= 0")
    return int(text)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number >= 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
