"""The words that the shell completes after each option: operators, GPUs, populations, dims, files.

`kgen completion` prints a function for the shell. At each TAB that function runs `kgen` with
`_ARGCOMPLETE` set, so the words are always up to date and include the user's own folders. torch is
not loaded.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import argcomplete
from argcomplete import io
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from kgen.assets import gpu_dir
from kgen.catalogue import Catalogue, load_profiles, open_catalogue, population_names
from kgen.errors import KgenError
from kgen.model.signature import Signature
from kgen.operators.base import Operator

Completer = Callable[..., Iterable[str]]

_EXTENT = re.compile(r"([A-Za-z]\w*)=(\d+)")


def operators(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """All operators, with those of `--path` and KGEN_PATH."""
    return _catalogue(parsed_args).names


def gpus(parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """All profiles, and `auto` if the command chooses a device."""
    names = sorted(file.stem for file in gpu_dir().glob("*.yaml"))
    return names if parsed_args.command == "report" else ["auto", *names]


def populations(parsed_args: argparse.Namespace, prefix: str, **_: Any) -> Iterable[str]:
    """The named populations, or files if the prefix is the beginning of a path."""
    if "/" in prefix:
        return _yaml_files(prefix)
    return population_names(_catalogue(parsed_args))


def problem(parsed_args: argparse.Namespace, prefix: str, **_: Any) -> Iterator[str]:
    """The next name or value in `M=8192,N=4096,dtype=bf16`, for the operator that `--op` names."""
    if not parsed_args.op:
        return
    operator = _catalogue(parsed_args).operator(parsed_args.op)
    before, comma, part = prefix.rpartition(",")
    name, equals, _value = part.partition("=")
    if equals:
        yield from (f"{before}{comma}{name}={value}" for value in _values(operator, name))
        return
    given = {text.partition("=")[0] for text in before.split(",")}
    yield from (f"{before}{comma}{each}=" for each in operator.signature.field_names
                if each not in given)


def _values(operator: Operator, name: str) -> list[str]:
    """All values of a dtype field or option; the extents of a dim in the operator's problems."""
    signature: Signature = operator.signature
    allowed = {choice.name: choice.allowed for choice in signature.choices}
    if name in allowed:  # the name of an earlier field stands for that field's dtypes
        words = [word for one in allowed[name] for word in allowed.get(one, (one,))]
        return list(dict.fromkeys(words))
    texts = [text for each in signature.passes for on_host in (False, True)
             for text in operator.default_problems(each.name, on_host)]
    pairs = [pair for text in texts for pair in _EXTENT.findall(text)]
    extents = {int(extent) for dim, extent in pairs if dim == name}
    return [str(extent) for extent in sorted(extents)]


def architectures(**_: Any) -> list[str]:
    """The architectures of all profiles."""
    return sorted({profile.arch for profile in load_profiles().values() if not profile.is_host})


def nothing(**_: Any) -> list[str]:
    """No words: for numbers, durations, and names that are known only after loading torch."""
    return []


def _listed(of: Completer) -> Completer:
    """Make the completer of a comma-separated list from the completer of one name."""

    def complete(prefix: str, **given: Any) -> list[str]:
        before, comma, _ = prefix.rpartition(",")
        taken = before.split(",")
        return [f"{before}{comma}{name}" for name in of(prefix=prefix, **given)
                if name not in taken]

    return complete


_yaml_files = FilesCompleter(("yaml", "yml"))
_files, _folders = FilesCompleter(), DirectoriesCompleter()

# destination of an option -> completer of its value; `command destination` if a command differs
COMPLETERS: Mapping[str, Completer] = {
    "op": operators, "gpu": gpus, "population": populations, "problem": problem,
    "populations name": populations, "new-op name": nothing,
    "add": _listed(operators), "learn_rankings": _listed(operators), "against": nothing,
    "arch": _listed(architectures),
    "report against": _yaml_files, "calls": _yaml_files, "coverage": _yaml_files,
    "path": _folders, "out": _folders, "source": _folders, "wheel": _folders, "t4": _folders,
    **dict.fromkeys(("files", "html", "markdown", "optuna", "summary", "svg", "trace",
                     "yaml"), _files),
    **dict.fromkeys(("array", "compile_memory", "compile_timeout", "compiled", "device",
                     "device_memory", "devices", "grace", "held_out", "idle", "only", "patience",
                     "points", "record", "runs", "sample", "search_time", "searches", "seed",
                     "storage", "time", "trial_timeout", "trials", "tunes"), nothing),
}  # fmt: skip


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, and end the process."""
    attach(parser)
    argcomplete.autocomplete(parser, always_complete_options="long")


def attach(parser: argparse.ArgumentParser) -> None:
    """Give argcomplete the completers of all options.

    Raises:
        KeyError: If `COMPLETERS` lacks an option that takes a value.
    """
    for command, action in valued(parser):
        found = COMPLETERS.get(f"{command} {action.dest}") or COMPLETERS[action.dest]
        action.completer = _safely(found)  # type: ignore[attr-defined]


def valued(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield (command, option) of all options that take a value without fixed choices."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, of_command in action.choices.items():
                yield from ((command, option) for option in of_command._actions
                            if option.nargs != 0 and option.choices is None)


def _safely(completer: Completer) -> Completer:
    """A completer that offers nothing if a name or a folder that the user typed does not exist."""

    def complete(**given: Any) -> Iterable[str]:
        try:
            return list(completer(**given))
        except (KgenError, OSError) as error:
            io.warn(str(error))
            return []

    return complete


def _catalogue(parsed_args: argparse.Namespace) -> Catalogue:
    return open_catalogue(getattr(parsed_args, "path", None) or [])
