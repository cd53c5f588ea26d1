"""Reports as flat data: one row per problem, as CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.model.record import RANDOM, TRAINED
from kgen.report.model import Environment
from kgen.report.searches import Search
from kgen.report.tables import ReportRow
from kgen.report.verdicts import runner_up_is_tie, standing


def flat_row(row: ReportRow, search: Search) -> dict[str, Any]:
    """One problem as plain data. Times are microseconds.

    `median_us` is the time in the final, in which winner and peers took turns, on the kind of
    inputs where the winner was slower. `inputs` names that kind; `random_us` and `trained_us` are
    the times on both kinds. `search_best_us` is the least of the single measurements of the search.
    """
    entry, fastest = row.report, row.fastest
    timing, second, best = entry.chosen.timing, entry.runner_up, search.best
    return {
        "operator": row.operator,
        "gpu": row.gpu,
        "pass": entry.pass_name,
        "name": row.label,
        "problem": entry.problem,
        "median_us": timing.median_us,
        "low_us": timing.low_us,
        "high_us": timing.high_us,
        "inputs": timing.inputs,
        "random_us": timing.by_inputs_us.get(RANDOM),
        "trained_us": timing.by_inputs_us.get(TRAINED),
        "floor_us": entry.floor_us,
        "floor_share": entry.floor_share,
        "fastest_peer": fastest.name if fastest else "",
        "fastest_peer_us": fastest.timing.median_us if fastest else None,
        "fastest_peer_over_kgen": row.ratio,
        "standing": standing(entry),
        "variant": entry.chosen.variant,
        "config": dict(entry.chosen.config),
        "record": entry.chosen.record,
        "runner_up_us": second.median_us if second else None,
        "runner_up_is_tie": runner_up_is_tie(entry),
        "search_best_us": best.timing.median_us if best and best.timing else None,
        "trials": entry.trials.count,
        "search_seconds": entry.trials.search_seconds,
        "l2": entry.l2,
        "slowed": entry.slowed,
        "environment": entry.environment,
        "peers_us": {peer.name: peer.timing.median_us for peer in entry.peers},
    }


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `flat_row` as CSV: a column per peer, the config as JSON."""
    peers = dict.fromkeys(name for row in rows for name in row["peers_us"])
    plain = [name for name in (rows[0] if rows else {}) if name != "peers_us"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*plain, *(f"{name}_us" for name in peers)])
    for row in rows:
        cells = [json.dumps(row[n]) if isinstance(row[n], dict) else row[n] for n in plain]
        writer.writerow([*cells, *(row["peers_us"].get(name) for name in peers)])
    return out.getvalue()


def to_json(
    rows: Sequence[Mapping[str, Any]], environments: Mapping[str, Environment]
) -> str:
    """Rows of `flat_row`, and the environments that they name."""
    data = {
        "rows": list(rows),
        "environments": {key: asdict(environment) for key, environment in environments.items()},
    }
    return json.dumps(data, indent=1) + "\n"
