"""The command-line parser of all commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from kgen import __version__
from kgen.cli import library_options as library
from kgen.cli import tuning_options as tuning
from kgen.cli.arguments import add_path, given_text
from kgen.cli.examples import EXAMPLES, FIRST, description, epilog
from kgen.errors import shortened

# (command, a line about it, the function that adds its options), in the order of `kgen --help`
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors suggest the nearest option, command or choice for an unknown one."""

    _given: Sequence[str] = ()

    # `Any` because argparse declares three overloads of each method.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse, which also calls the commands' parsers by this method."""
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse; the error comes from the command's parser, which knows its options."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self._parsers.get(found.command, self).error(
                f"unrecognized arguments: {' '.join(map(shortened, rest))}")
        return found

    @property
    def _parsers(self) -> dict[str | None, argparse.ArgumentParser]:
        """The commands' parsers."""
        return {name: parser for action in self._actions
                if isinstance(action, argparse._SubParsersAction)
                for name, parser in action.choices.items()}

    def error(self, message: str) -> NoReturn:
        """Print the usage, the message and a suggestion, and exit with code 2."""
        options = {name.lstrip("-"): name for name in self._option_string_actions}
        hints = [
            f"did you mean {options[near[0]]} instead of {shortened(name)}?"
            for name in self._unknown()
            if (near := get_close_matches(name.lstrip("-").lower(), options, n=1))
        ]
        if choice := _INVALID_CHOICE.search(message):
            known = {name.lower(): name for name in re.findall(r"[\w-]+", choice[2])}
            near = get_close_matches(choice[1].lower(), known, n=1)
            hints += [f"did you mean {known[name]}?" for name in near]
        hints.append(f"next: {self.prog} --help lists what there is")
        super().error("\n  ".join([message, *hints]))

    def _unknown(self) -> list[str]:
        """The options on the command line that this parser does not know."""
        commands = self._parsers
        found = []
        for text in self._given:
            if text == "--" or (commands and not text.startswith("-")):
                break  # the command's own parser reads the remaining words
            name = text.partition("=")[0]
            if name.startswith("--") and not any(
                    known.startswith(name) for known in self._option_string_actions):
                found.append(name)
        return list(dict.fromkeys(found))


_INVALID_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", re.DOTALL)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
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
        command.register("type", None, given_text)  # the type of every option that declares none
        add_options(command)
    return parser
