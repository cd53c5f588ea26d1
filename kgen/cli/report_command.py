"""`kgen report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.cli.opening import LIBRARY
from kgen.errors import CatalogueError, suggest
from kgen.report import load_report, print_report


def run(options: argparse.Namespace) -> int:
    """Print the reports under the output folder that `--op` and `--gpu` select.

    Raises:
        CatalogueError: If there is none.
    """
    library = Path(options.out) / LIBRARY
    files = sorted(library.glob("*/reports/*.yaml"))
    chosen = [
        f
        for f in files
        if options.op in (None, f.parent.parent.name) and options.gpu in (None, f.stem)
    ]
    if not chosen:
        known = [f"{f.parent.parent.name} on {f.stem}" for f in files]
        raise CatalogueError(
            f"no report of {options.op or 'any operator'} on {options.gpu or 'any GPU'} under "
            f"{library}\n  {suggest('', known)}\n  kgen tune writes them"
        )
    for i, file in enumerate(chosen):
        print(("\n" if i else "") + print_report(load_report(file)), end="")
    return 0
