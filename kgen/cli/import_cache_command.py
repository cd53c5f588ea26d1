"""`kgen import-cache`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kgen.report.imported import read_search
from kgen.report.studies import write_studies


def run(options: argparse.Namespace) -> int:
    """Write the searches of other tuners' files as Optuna studies.

    Raises:
        RecordError: If a file has neither of the two formats.
        StorageError: If the studies cannot be written.
    """
    studies = [read_search(Path(file)) for file in options.files]
    taken: dict[str, int] = {}
    for i, study in enumerate(studies):
        taken[study.name] = taken.get(study.name, 0) + 1
        if taken[study.name] > 1:
            studies[i] = replace(study, name=f"{study.name} ({taken[study.name]})")
    trials = write_studies(Path(options.optuna), studies)
    print(f"wrote {options.optuna}: {len(studies)} studies, {trials} trials  "
          f"(optuna-dashboard {options.optuna})")
    return 0
