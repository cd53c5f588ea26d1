"""`kgen emit`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import Catalogue, open_catalogue
from kgen.emit import Emitted, LoadedLibrary, renew, require_operator, write_rankings
from kgen.predict import rankings

EXIT_STALE = 3


def run(options: argparse.Namespace) -> int:
    """Write the library under `--out` again with the present templates, and print what changed.

    Returns:
        0 if all rows are valid, 3 if some are stale.
    Raises:
        CatalogueError: If there is no library, or an operator is unknown.
        ProblemError: If --learn-rankings names an operator that the library does not have.
        RecordError: If a table is damaged.
        ToolchainError: If a kernel has to be compiled, and there is no NVRTC.
        StorageError: If a file cannot be written.
    """
    catalogue = open_catalogue(options.path)
    if options.learn_rankings:
        for name in options.learn_rankings:  # checked before minutes of work
            if name not in options.add:
                require_operator(Path(options.out), name)
    done = renew(
        options.out,
        catalogue.entry,
        include_dir(),
        lambda headers: open_compiler("nvrtc", [headers]),
        [catalogue.entry(name) for name in options.add],
    )
    if options.learn_rankings:
        learnt = _learn_rankings(done, catalogue, options.learn_rankings)
        done = replace(done, changed=tuple(dict.fromkeys((*done.changed, *learnt))))
    for path in done.changed:
        print(f"written  {path}")
    for path in done.removed:
        print(f"removed  {path}")
    for row in done.stale:
        print(row)
    print(
        f"{done.root}: {', '.join(done.operators)}; {len(done.changed)} files written, "
        f"{len(done.removed)} removed; {done.compiled} kernels compiled, {done.kept} rows valid, "
        f"{len(done.stale)} stale"
    )
    return EXIT_STALE if done.stale else 0


def _learn_rankings(
    done: Emitted, catalogue: Catalogue, operators: Iterable[str]
) -> tuple[str, ...]:
    """Learn the models of operators; return the files that changed."""
    with LoadedLibrary.open(done.root, "--out") as library:
        found = {}
        for name in operators:
            library.require(name)
            found[name] = rankings(library, catalogue, catalogue.entry(name))
    return write_rankings(done.root, found)
