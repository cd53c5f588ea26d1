"""`kgen learn`."""

from __future__ import annotations

import argparse

from kgen.cli.context import open_command
from kgen.errors import ProblemError, suggest
from kgen.learn import LearnJob, learn, print_learning
from kgen.model.signature import Signature
from kgen.tune import Limits


def run(options: argparse.Namespace) -> int:
    """Learn dispatch rules, publish them, and print their losses."""
    with open_command(options) as common:
        print(
            f"learning rules of {common.entry.operator.name} on {common.gpu.title}, compiler "
            f"{common.compiler.name} {common.compiler.version}",
            flush=True,
        )
        learnt = learn(
            LearnJob(
                entry=common.entry,
                passes=common.passes,
                # Without --problem only the tuned problems are used, not the operator's defaults.
                problems=common.problems if options.problem else dict.fromkeys(common.passes, ()),
                gpu=common.gpu,
                ordinal=common.ordinal,
                compiler=common.compiler,
                out=common.out,
                reports=common.reports,
                only=_pairs(options.only, common.entry.operator.signature),
                points=options.points,
                searches=options.searches,
                search_s=options.search_time,
                time_s=options.time,
                held_out=options.held_out,
                trials=options.trials,
                seed=options.seed,
                paths=common.paths,
                l2=options.l2,
                say=lambda text: print(text, flush=True),
                limits=Limits(options.trial_timeout),
            )
        )
    print(f"\n{print_learning(learnt.report)}")
    if common.gpu.is_host:
        print("  (times of a shared CPU: they do not predict a GPU's)")
    if learnt.library is not None:
        print(f"\nlibrary  {learnt.library.root}")
    print(f"report   {learnt.report_path}")
    return 0


def _pairs(text: str | None, signature: Signature) -> tuple[tuple[str, str], ...]:
    """Parse `--only`: `N=4096,dtype=bf16`; empty if the option is not given.

    Raises:
        ProblemError: If a name is unknown or repeated, or a value is missing.
    """
    pairs: list[tuple[str, str]] = []
    for part in () if text is None else text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        why = ""
        if not value:
            why = f"'{part}' is not name=value"
        elif name not in signature.field_names:
            why = f"unknown name '{name}'"
        elif name in dict(pairs):
            why = f"'{name}' is given twice"
        if why:
            raise ProblemError(
                f"--only '{text}': {why}\n  {suggest(name, signature.field_names)}"
            )
        pairs.append((name, value))
    return tuple(pairs)
