"""The part of `kgen report` about predicted rows."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kgen.catalogue import Catalogue
from kgen.cli.context import LIBRARY
from kgen.errors import KgenError
from kgen.model.names import short_name
from kgen.model.problem import parse_problem
from kgen.report.predictions import (
    FOLDER,
    Prediction,
    Predictions,
    load_predictions,
    print_predictions,
)

# Options of `kgen report` whose output holds measurements only.
_MEASURED_ONLY = ("csv", "json", "markdown", "svg", "summary", "html", "optuna", "t4", "against")


def printed_predictions(options: argparse.Namespace, catalogue: Catalogue) -> str:
    """Return the predictions that the options of `kgen report` select, as text.

    The text is empty if there are no predictions, or if the options select an output that holds
    measurements only.

    Raises:
        RecordError: If a file of predictions is not what kgen wrote.
    """
    if any(getattr(options, name) for name in _MEASURED_ONLY):
        return ""
    files = sorted((Path(options.out) / LIBRARY).glob(f"*/reports/{FOLDER}/*.yaml"))
    parts = []
    for path in files:
        operator = path.parents[2].name
        if options.op in (None, operator) and options.gpu in (None, path.stem):
            parts.append(print_predictions(_selected(load_predictions(path), options, catalogue)))
    return "\n".join(filter(None, parts))


def _selected(
    found: Predictions, options: argparse.Namespace, catalogue: Catalogue
) -> Predictions:
    """The predictions of the chosen pass for the chosen problems."""
    kept = [
        p for p in found.problems
        if options.pass_name in (None, p.pass_name)
        and (not options.problem
             or any(_is_named(found.operator, p, text, catalogue) for text in options.problem))
    ]
    return replace(found, problems=tuple(kept))


def _is_named(operator: str, one: Prediction, text: str, catalogue: Catalogue) -> bool:
    """Whether a text is the identity of a prediction's record, or words of its problem's name."""
    words = {*one.problem.split(","), one.record}
    try:
        signature = catalogue.operator(operator).signature
        words |= set(short_name(parse_problem(one.problem, signature), signature).split())
    except KgenError:
        pass  # the operator or a field is not known here
    return set(text.replace(",", " ").split()) <= words
