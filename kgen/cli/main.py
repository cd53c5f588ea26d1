"""The entry point of `kgen`: the only place that turns errors into messages and exit codes.

Commands are imported when they run: `kgen --help` and `kgen ops` load neither torch nor Optuna.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from kgen.cli.helper_process import HELPER
from kgen.errors import KgenError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0: done. 1: something failed. 2: the user's mistake. 3: rows are stale (emit). 130: interrupted.
    """
    _open_standard_files()
    try:
        code = _run(arguments)
        sys.stdout.flush()  # raises an error here if the disk is full
        return code
    except KeyboardInterrupt as problem:  # also while modules load
        how = f"ended by {problem.name}" if isinstance(problem, _Ended) else "interrupted"
        if HELPER not in os.environ:
            _complain(f"{how}; {_what_is_kept(arguments)}")
        return 128 + problem.number if isinstance(problem, _Ended) else EXIT_INTERRUPTED
    except BrokenPipeError:  # `kgen report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as problem:
        _complain(
            f"{'' if problem.filename is None else f'{problem.filename}: '}"
            f"{problem.strerror or problem}\n"
            "  check permissions and free space"
        )
        return EXIT_FAILURE


# What remains after an interrupted command; commands that are not listed leave nothing behind.
_KEPT = {
    **dict.fromkeys(
        ("tune", "learn"), "finished trials are in the journal, and the same command resumes"
    ),
    "worker": "finished trials are handed in, and the same command goes on",
    "package": "compiled kernels are in the cache, and the same command goes on",
}


def _what_is_kept(arguments: Sequence[str] | None) -> str:
    given = sys.argv[1:] if arguments is None else arguments
    return _KEPT.get(given[0] if given else "", "the same command starts anew")


def _run(arguments: Sequence[str] | None) -> int:
    """Parse the command line and run its command, which may end in any error but a `KgenError`."""
    from kgen.cli.parser import build_parser  # takes 0.1 s; `main` handles Ctrl-C meanwhile

    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for words at TAB
        from kgen.cli.completers import complete

        complete(parser)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return EXIT_USAGE
    # The search factors matrices of a few hundred rows. On 16 cores OpenBLAS's threads made a
    # proposal five times as slow and took cores from compilations. OpenBLAS reads the variable when
    # numpy is loaded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    name = options.command.replace("-", "_")
    try:
        _end_like_interrupted()
        command = importlib.import_module(f"kgen.cli.{name}_command")
        return int(command.run(options))
    except KgenError as problem:
        _complain(f"{type(problem).__name__}: {problem}")
        return problem.exit_code
    except SystemExit as problem:  # no command exits this way by itself
        _complain(
            f"a function of the operator's module called sys.exit({problem.code!r})\n"
            "  next: raise an error there"
        )
        return EXIT_FAILURE


class _Ended(KeyboardInterrupt):
    """A signal other than SIGINT ends the process."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def name(self) -> str:
        """Name of the signal, for instance `SIGTERM`."""
        return signal.Signals(self.number).name


def _end_like_interrupted() -> None:
    """Make SIGTERM and SIGHUP act like Ctrl-C, which ends workers and removes temporary files."""

    def end(number: int, frame: object) -> None:
        # A second signal must not interrupt the cleanup. SIG_IGN is no solution: a process that a
        # thread starts meanwhile would inherit it, and ninja's commands would not end.
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, lambda number, frame: None)
        raise _Ended(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                signal.signal(number, end)


def _open_standard_files() -> None:
    """Open the standard files that the shell closed (`kgen ops >&-`).

    Otherwise a file that is opened later would get the number of the closed file.
    """
    for stream in ("stdin", "stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115


def _complain(text: str) -> None:
    print(f"\nkgen: {text}" if sys.stderr.isatty() else f"kgen: {text}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
