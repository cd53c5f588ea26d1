"""`kgen explain`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from kgen.cli.opening import LIBRARY
from kgen.emit import no_library
from kgen.errors import CatalogueError, ProblemError

# Arguments of the library's `explain` that other options stand for.
_NOT_DIMS = frozenset({"operator", "device", "gpu", "pass_name"})


def run(options: argparse.Namespace) -> int:
    """Ask the library under `--from` which kernel serves a problem, and print its answer.

    Raises:
        CatalogueError: If there is no library, or it refuses to load.
        ProblemError: If operator, GPU or problem are not what the library knows.
    """
    folder = Path(options.source).resolve()
    if not (folder / LIBRARY / "__init__.py").is_file():
        raise no_library(Path(options.source), "--from")
    problem = _parsed(options.problem)
    where = {} if options.gpu == "auto" else {"gpu": options.gpu}
    sys.path.insert(0, str(folder))
    try:
        library = importlib.import_module(LIBRARY)
        print(library.explain(options.op, pass_name=options.pass_name, **where, **problem))
    except (ValueError, TypeError) as error:
        raise ProblemError(str(error)) from None
    except (ImportError, RuntimeError) as error:  # the library's own errors are RuntimeErrors
        raise CatalogueError(f"{folder / LIBRARY}: {error}") from None
    finally:
        sys.path.remove(str(folder))
    return 0


def _parsed(text: str) -> dict[str, int | str]:
    """Read `M=8192,dtype=bf16`; which names there are, the library knows."""
    problem: dict[str, int | str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        taken = name in problem or name in _NOT_DIMS
        if not name.isidentifier() or not equals or not value or taken:
            raise ProblemError(f"--problem '{text}': '{part}' is no name=value, or there twice\n"
                               "  example: M=8192,N=4096,dtype=bf16")
        problem[name] = int(value) if value.isdecimal() else value
    return problem
