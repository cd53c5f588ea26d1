"""The exceptions of kgen, one class per kind of mistake or failure.

A message says what is wrong, where, the value, what is allowed, and the next step. A `UserError`
ends a command with exit code 2 (the user can fix it), any other `KgenError` with exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class KgenError(Exception):
    """An expected failure; its text is for the user. Exit code 1."""

    exit_code = 1


class UserError(KgenError):
    """A mistake in the user's input. Exit code 2."""

    exit_code = 2


class ExprError(UserError):
    """An expression of a search space is not in the allowed language or cannot be evaluated."""


class SpaceError(UserError):
    """A search-space file is malformed or contradicts its operator or template."""


class EmptySpaceError(SpaceError):
    """No config of the space is feasible for a problem."""


class PopulationError(UserError):
    """A population file is malformed, or names something that its operators do not have."""


class CapturedCallsError(UserError):
    """A file of captured calls is malformed, or names something that no operator here has."""


class CatalogueError(UserError):
    """A requested operator, pass, GPU profile or file does not exist or does not load."""


class ProblemError(UserError):
    """A problem string names an unknown dim or dtype, or lacks a dim."""


class OptionError(UserError):
    """Options of a command contradict each other."""


class GpuError(UserError):
    """The requested GPU is not in this machine."""


class TemplateError(UserError):
    """A template uses an undeclared name or is not valid Jinja."""


class RecordError(UserError):
    """A record, journal or report file does not have the documented format."""


class ToolchainError(KgenError):
    """A compiler or its libraries are missing or unusable."""


class BuildError(KgenError):
    """A rendered kernel does not compile; the text carries the compiler's own message."""


class LaunchError(KgenError):
    """The driver or the host layer refused or aborted a launch."""


class LaunchRefusedError(LaunchError):
    """A launch needs more than the device has; nothing ran, and the device is unaffected."""


class VerifyError(KgenError):
    """A kernel's outputs differ from the operator's definition."""


class InexactDefinitionError(VerifyError):
    """For some inputs the definition itself is too inexact to tell right from wrong kernels."""


class WorkerError(KgenError):
    """The worker process could not be started or kept dying."""


class StorageError(KgenError):
    """A file could not be written: no permission, disk full, lock held."""


class TuneError(KgenError):
    """A tune request ended with no verified config."""


class PredictError(KgenError):
    """A prediction has nothing to learn from, or ended with no verified config."""


class BenchError(KgenError):
    """A kernel that was to be timed is wrong, so nothing was timed."""


def suggest(value: str, known: Iterable[str]) -> str:
    """Return a hint line: the nearest known name if there is one, then all known names."""
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    near = get_close_matches(value, names, n=1) or [
        by_lower_case[match] for match in get_close_matches(value.lower(), by_lower_case, n=1)]
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}known: {', '.join(names) if names else '(none)'}"


def why_unreadable(problem: OSError | ValueError) -> str:
    """Why a file cannot be read, and the next step; without the path, which the message names."""
    if isinstance(problem, FileNotFoundError):
        step = "check the path: it counts from the current folder"
    elif isinstance(problem, IsADirectoryError):
        step = "name a file, not a folder"
    elif isinstance(problem, PermissionError):
        step = "make the file readable (chmod u+r)"
    elif isinstance(problem, UnicodeError):
        step = "name a text file in UTF-8"
    else:
        step = "check the path and the disk"
    why = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
    return f"{why}\n  next: {step}"


def with_next_step(error: UserError, step: str) -> UserError:
    """Return an error whose text ends with the next step, unless the text names one already."""
    text = str(error)
    return error if "next: " in text else type(error)(
        f"{text}\n  next: {step}")


def shortened(value: str, most: int = 60) -> str:
    """Return a value for a message: only its beginning if it is longer than `most` characters."""
    return value if len(value) <= most else f"{value[: most - 3]}..."
