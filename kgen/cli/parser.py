"""The command-line parser of all commands."""

from __future__ import annotations

import argparse

from kgen import __version__
from kgen.cli.arguments import (
    add_common,
    add_l2,
    add_path,
    add_population,
    duration,
    memory_size,
)
from kgen.cli.examples import EXAMPLES, FIRST, description, epilog


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kgen",
        description="Autotune CUDA kernels per GPU and shape; verified before they are timed.",
        epilog=epilog(FIRST),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kgen {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    tune = commands.add_parser("tune", help="search, verify and emit the best kernels")
    add_common(tune, problems=True, passes=True, compiler=True, seed=True, population=True)
    tune.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="most trials per problem, including those of earlier tunes (default: 160; 12 on the "
        "host); warm-start trials of a variant that is newer than the journal do not count",
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
        help="a trial that takes longer is killed and recorded (default: 30s)",
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
        help="try again configs that crashed or timed out in earlier tunes",
    )
    tune.add_argument(
        "--no-peers",
        action="store_true",
        help="do not time eager PyTorch and torch.compile with the winner",
    )

    _add_learn(commands.add_parser(
        "learn", help="learn rules that choose rows for problems that were not tuned"
    ))

    verify = commands.add_parser("verify", help="check kernels against the float64 definition")
    add_common(verify, problems=True, passes=True, compiler=True, seed=True)
    verify.add_argument(
        "--sanitize",
        action="store_true",
        help="also run the kernels under compute-sanitizer's memcheck and racecheck "
        "(with --gpu host: under AddressSanitizer)",
    )
    verify.add_argument(
        "--record", metavar="ID", help="verify the config of one record of the journal again"
    )
    verify.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the records are (default: %(default)s)",
    )

    bench = commands.add_parser("bench", help="compare tuned kernels with their peers")
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
    bench.add_argument(
        "--yaml", metavar="FILE", help="write all results to a file; see docs/bench.md"
    )
    bench.add_argument(
        "--profile",
        action="store_true",
        help="run kernel and peers under torch.profiler instead of timing them: end-to-end time, "
        "largest kernel, a trace",
    )
    bench.add_argument(
        "--call-cost",
        action="store_true",
        help="measure the host time of a call instead, of kgen_ops and the peers (default problem: "
        "the operator's smallest)",
    )
    bench.add_argument(
        "--trace",
        metavar="FILE",
        help="where --profile writes the trace (default: OP-GPU.pt.trace.json)",
    )
    check = commands.add_parser(
        "measure-check", help="measure how well timings on this machine repeat"
    )
    _add_measure_check(check)

    _add_report(commands.add_parser("report", help="print the reports of earlier tunes"))
    _add_import_cache(commands.add_parser(
        "import-cache", help="read searches of other tuners: T4 results, Kernel Tuner caches"
    ))
    _add_package(commands.add_parser("package", help="write a wheel of the tuned library"))
    _add_explain(commands.add_parser("explain", help="explain which kernel serves a problem"))

    _add_coverage(commands.add_parser(
        "coverage", help="show what the library does on a population of problems, and how fast"
    ))

    renew = commands.add_parser(
        "emit",
        help="write the library again from today's templates, and list stale rows"
    )
    renew.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )
    operators = commands.add_parser("ops", help="list operators, passes and variants")
    for command in (renew, operators):
        add_path(command)
    _add_new_op(commands.add_parser("new-op", help="write the files of an operator of your own"))
    commands.add_parser("gpus", help="list GPU profiles")
    _add_populations(commands.add_parser(
        "populations", help="list the problems that published models call"
    ))
    library = commands.add_parser("device-library", help="print the reference of kgen:: functions")
    library.add_argument("--markdown", metavar="FILE", help="write it to a file instead")
    commands.add_parser("doctor", help="check compilers, packages and GPUs")
    for name, command in commands.choices.items():
        command.description = description(name)
        command.epilog = epilog(EXAMPLES.get(name, ()))
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of names; example: eager,liger")
    return names


def _add_learn(learn: argparse.ArgumentParser) -> None:
    add_common(learn, problems=True, passes=True, compiler=True, seed=True)
    add_l2(learn)
    learn.add_argument(
        "--only",
        default="",
        metavar="N=..,dtype=..",
        help="learn only for problems with these values (default: all; other rules stay)",
    )
    learn.add_argument(
        "--points",
        type=_positive,
        default=12,
        metavar="N",
        help="training problems per rule, including the tuned ones (default: %(default)s)",
    )
    learn.add_argument(
        "--time",
        type=duration,
        metavar="60s",
        help="time for learning, --held-out excluded: 90, 60s, 5m (default: no limit)",
    )
    learn.add_argument(
        "--searches",
        type=_count,
        default=1,
        metavar="N",
        help="short searches per rule, on training problems far from the tuned ones; their best "
        "configs become candidates (default: %(default)s)",
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
        help="judge the rules on N other problems of each pass: search each, and time the rule's "
        "choice against the best config found (default: %(default)s)",
    )
    learn.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="most trials of each search (default: 160; 12 on the host)",
    )
    learn.add_argument(
        "--trial-timeout",
        type=duration,
        default=30.0,
        metavar="30s",
        help="a trial that takes longer is killed and recorded (default: 30s)",
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
        help="comparisons of a kernel with itself, each in a new process (default: %(default)s)",
    )
    check.add_argument("--yaml", metavar="FILE", help="also write the result to a file")
    check.add_argument(
        "--strict", action="store_true", help="exit with 1 if a comparison misses its bar"
    )
    check.set_defaults(out="generated")


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("--op", metavar="OP", help="only this operator, all its rows")
    report.add_argument("--gpu", metavar="GPU", help="only this GPU")
    report.add_argument(
        "--pass",
        dest="pass_name",
        choices=["forward", "backward"],
        help="only this pass, all its rows",
    )
    report.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="NAME",
        help="only problems of this name, all about each: a short name, some of its words "
        "('bf16 +state'), a full key or a winner's record (repeatable)",
    )
    report.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )
    add_path(report)
    form = report.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="print everything of every problem")
    form.add_argument("--csv", action="store_true", help="print one line per problem as CSV")
    form.add_argument("--json", action="store_true", help="print one object per problem as JSON")
    form.add_argument(
        "--against",
        metavar="OLD.yaml",
        help="compare with an older report of the operator: what is faster, slower, stale",
    )
    report.add_argument(
        "--html",
        metavar="FILE",
        help="write one page with figures, searches, evidence and sources; needs no network",
    )
    report.add_argument(
        "--optuna",
        metavar="FILE",
        help="write an Optuna study per search, which optuna-dashboard opens (SQLite if FILE ends "
        "in .db)",
    )
    report.add_argument(
        "--t4",
        metavar="DIR",
        help="write each search as T4 results and as a Kernel Tuner cache file",
    )
    report.add_argument(
        "--markdown", metavar="FILE", help="write all tables to a Markdown file instead of printing"
    )
    report.add_argument(
        "--svg",
        metavar="FILE",
        help="write a picture: the time of kgen beside the fastest peer's, for each problem",
    )
    report.add_argument(
        "--summary",
        metavar="FILE",
        help="replace the table between the markers in FILE: one row per operator and pass",
    )


def _add_import_cache(import_cache: argparse.ArgumentParser) -> None:
    import_cache.add_argument(
        "files", nargs="+", metavar="FILE", help="T4 results, or a Kernel Tuner cache file"
    )
    import_cache.add_argument(
        "--optuna",
        required=True,
        metavar="FILE",
        help="where to write an Optuna study per search (SQLite if FILE ends in .db)",
    )


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
    add_population(package, "compile ahead what families give for the problems that published "
                   "models call")
    add_path(package, "operators and populations")
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
        help="'auto' (the current CUDA GPU, else the CPU), or any GPU of 'kgen gpus', which need "
        "not be in this machine; one without a table of its own shows what would serve there "
        "(default: %(default)s)",
    )
    _add_source(explain)


def _add_coverage(coverage: argparse.ArgumentParser) -> None:
    add_common(coverage, problems=True, passes=True, compiler=True, seed=True, population=True)
    coverage.add_argument(
        "--steps",
        action="store_true",
        help="only tell which dispatch step serves each problem; --gpu need not be in this machine",
    )
    coverage.add_argument(
        "--against",
        type=_names,
        metavar="NAME,...",
        help="only these peers: eager, torch.compile, ... (default: all that are installed)",
    )
    coverage.add_argument(
        "--sample",
        type=_positive,
        default=0,
        metavar="N",
        help="search N problems of each pass, and tell what the library loses against the result "
        "(default: none)",
    )
    coverage.add_argument(
        "--search-time",
        type=duration,
        default=5.0,
        metavar="5s",
        help="time for each of these searches (default: 5s)",
    )
    coverage.add_argument(
        "--first-calls",
        action="store_true",
        help="time the first call of each problem too; KGEN_CACHE_DIR=$(mktemp -d) empties the "
        "cache of kernels for it",
    )
    coverage.add_argument(
        "--out",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )
    coverage.add_argument("--yaml", metavar="FILE", help="write all results to a file")


def _add_populations(populations: argparse.ArgumentParser) -> None:
    populations.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="print the problems of this population, or of this file of your own",
    )
    populations.add_argument("--op", default="", metavar="OP", help="only this operator")
    populations.add_argument(
        "--pass",
        dest="pass_name",
        default="",
        choices=["forward", "backward"],
        help="only this pass",
    )
    add_path(populations, "operators and populations")


def _add_new_op(new_op: argparse.ArgumentParser) -> None:
    new_op.add_argument("name", metavar="NAME", help="of the operator: lower case, as in Python")
    new_op.add_argument(
        "--path",
        default="mine",
        metavar="DIR",
        help="where to write operators/, templates/ and search_spaces/ (default: %(default)s)",
    )


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
