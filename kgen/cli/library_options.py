"""Options of the commands that read the library and its reports, and of small commands."""

from __future__ import annotations

import argparse

from kgen.cli.arguments import add_out, add_path, add_population, names


def add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("--op", metavar="OP", help="only this operator, with all its problems")
    report.add_argument("--gpu", metavar="GPU", help="only this GPU")
    report.add_argument(
        "--pass",
        dest="pass_name",
        choices=["forward", "backward"],
        help="only this pass, with all its problems",
    )
    report.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="NAME",
        help="everything about the problems of this name: a short name, some of its words "
        "('bf16 +state'), a full name or the record id of a winner (repeatable)",
    )
    add_out(report, "where the library is")
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
        "--coverage",
        action="append",
        default=[],
        metavar="FILE",
        help="with --html: also draw a file that kgen coverage --yaml wrote (repeatable)",
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


def add_import_cache(import_cache: argparse.ArgumentParser) -> None:
    import_cache.add_argument(
        "files", nargs="+", metavar="FILE", help="T4 results, or a Kernel Tuner cache file"
    )
    import_cache.add_argument(
        "--optuna",
        required=True,
        metavar="FILE",
        help="where to write an Optuna study per search (SQLite if FILE ends in .db)",
    )


def add_package(package: argparse.ArgumentParser) -> None:
    package.add_argument(
        "--arch",
        type=names,
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
    add_population(package, "also compile the kernels for untuned problems that published models "
                   "call")
    add_path(package, "operators and populations")
    _add_source(package)


def add_explain(explain: argparse.ArgumentParser) -> None:
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
        "not be in this machine and need not have been tuned (default: %(default)s)",
    )
    _add_source(explain)


def add_emit(renew: argparse.ArgumentParser) -> None:
    renew.add_argument(
        "--add",
        type=names,
        default=(),
        metavar="OP,...",
        help="add operators that were not tuned on any GPU, with their safe kernels and templates",
    )
    renew.add_argument(
        "--learn-rankings",
        type=names,
        default=(),
        metavar="OP,...",
        help="fit, for these operators, the model that ranks configs for calls without a row, from "
        "the recorded searches",
    )
    add_out(renew, "where the library is")
    add_path(renew)


def add_populations(populations: argparse.ArgumentParser) -> None:
    populations.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="print the problems of this population, or of this file of your own",
    )
    populations.add_argument("--op", metavar="OP", help="only this operator")
    populations.add_argument(
        "--pass",
        dest="pass_name",
        choices=["forward", "backward"],
        help="only this pass",
    )
    add_path(populations, "operators and populations")


def add_new_op(new_op: argparse.ArgumentParser) -> None:
    new_op.add_argument("name", metavar="NAME", help="name of the operator, in lower case")
    new_op.add_argument(
        "--path",
        default="mine",
        metavar="DIR",
        help="where to write operators/, templates/ and search_spaces/ (default: %(default)s)",
    )


def add_completion(completion: argparse.ArgumentParser) -> None:
    completion.add_argument(
        "shell", choices=["bash", "zsh", "fish"], help="your shell"
    )


def add_device_library(library: argparse.ArgumentParser) -> None:
    library.add_argument("--markdown", metavar="FILE", help="write it to a file instead")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        default="generated",
        metavar="DIR",
        help="where the library is (default: %(default)s)",
    )
