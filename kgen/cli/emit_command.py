"""`kgen emit`."""

from __future__ import annotations

import argparse

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.emit import renew


def run(options: argparse.Namespace) -> int:
    """Write the library under `--out` again from its tables, and say what changed.

    Raises:
        CatalogueError: If there is no library, or an operator of it is unknown.
        RecordError: If a table is damaged.
        StorageError: If a file cannot be written.
    """
    catalogue = open_catalogue(options.path)
    done = renew(options.out, lambda name: catalogue.entry(name).operator, include_dir())
    for path in done.changed:
        print(f"written  {path}")
    for path in done.removed:
        print(f"removed  {path}")
    print(f"{done.root}: {', '.join(done.operators)}; {len(done.changed)} files written, "
          f"{len(done.removed)} removed")
    return 0
