"""The command-line parser of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kgen import __version__
from kgen.cli import library_options as library
from kgen.cli import tuning_options as tuning
from kgen.cli.arguments import add_path, given_text
from kgen.cli.examples import EXAMPLES, FIRST, description, epilog

# command, a line about it, and what adds its options; in the order of `kgen --help`
_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("tune", "search, verify and emit the best kernels", tuning.add_tune),
    ("predict", "choose kernels for a GPU that is not in this machine, by a model",
     tuning.add_predict),
    ("worker", "run trials for the tunes of other machines", tuning.add_worker),
    ("learn", "learn rules that choose rows for problems that were not tuned", tuning.add_learn),
    ("verify", "check kernels against the float64 definition", tuning.add_verify),
    ("bench", "compare tuned kernels with their peers", tuning.add_bench),
    ("measure-check", "measure how well timings on this machine repeat", tuning.add_measure_check),
    ("report", "print the reports of earlier tunes", library.add_report),
    ("import-cache", "read searches of other tuners: T4 results, Kernel Tuner caches",
     library.add_import_cache),
    ("package", "write a wheel of the tuned library", library.add_package),
    ("explain", "explain which kernel serves a problem", library.add_explain),
    ("coverage", "show which kernel the library runs for each problem of a list, and its time",
     tuning.add_coverage),
    ("emit", "write the library again from the current templates, and list stale rows",
     library.add_emit),
    ("ops", "list operators, passes and variants", add_path),
    ("new-op", "write the files of an operator of your own", library.add_new_op),
    ("gpus", "list GPU profiles", lambda parser: None),
    ("populations", "list the problems that published models call", library.add_populations),
    ("device-library", "print the reference of kgen:: functions", library.add_device_library),
    ("completion", "print a shell function that completes kgen's commands", library.add_completion),
    ("doctor", "check compilers, packages and GPUs", lambda parser: None),
)


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
    for name, line, add_options in _COMMANDS:
        command = commands.add_parser(
            name,
            help=line,
            description=description(name),
            epilog=epilog(EXAMPLES.get(name, ())),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.register("type", None, given_text)  # of every option that names no type
        add_options(command)
    return parser
