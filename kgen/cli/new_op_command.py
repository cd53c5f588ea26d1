"""`kgen new-op`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kgen.catalogue import open_catalogue
from kgen.scaffold import write_operator


def run(options: argparse.Namespace) -> int:
    """Write the files of a new operator; print their names and the next commands to run."""
    folder = Path(options.path)
    for path in write_operator(options.name, folder, open_catalogue().names):
        print(path)
    print(f"next: kgen tune --op {options.name} --path {folder} --gpu auto\n"
          f"      then put your own formula into {folder / 'operators' / options.name}.py")
    return 0
