"""The content of the HTML report as plain data: results, searches, evidence, sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from kgen.catalogue.gpus import load_profiles
from kgen.catalogue.yaml_tree import LOADER, refuse_traps
from kgen.errors import ProblemError, RecordError
from kgen.measure.floor import rate_tflops
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate, Record, Timing
from kgen.operators.base import Operator
from kgen.report.by_inputs import by_inputs
from kgen.report.compared import Pair, differing_environments
from kgen.report.details import environment_facts, evidence_lines, repeat_commands
from kgen.report.model import Report
from kgen.report.population_map import PopulationMap, map_data, shape_and_kind
from kgen.report.searches import Search, search_of
from kgen.report.tables import ReportRow
from kgen.report.verdicts import Tally, runner_up_is_tie, standing

_MESSAGES = 12  # most frequent reasons of refused trials that are shown of a problem


@dataclass(frozen=True)
class Shown:
    """One report of the page.

    Attributes:
        report: The report.
        rows: All rows of the report, or some of them, under their short names.
        searches: Trials by pass and problem.
        operator: The operator's declaration, for the roofline; None if kgen does not know it.
        folder: The folder of the operator in the library, with tables and kernels.
        old: An older report to compare with.
        pairs: The comparison with the older report.
        options: Further options of the commands that repeat a row, such as ` --out DIR`.
    """

    report: Report
    rows: Sequence[ReportRow]
    searches: Mapping[tuple[str, str], Search]
    operator: Operator | None
    folder: Path
    old: Report | None = None
    pairs: Sequence[Pair] = field(default=())
    options: str = ""


@dataclass(frozen=True)
class PageData:
    """Attributes:
        page: Everything but sources.
        sources: Text of kernels by digest.
    """

    page: dict[str, Any]
    sources: dict[str, str]


def page_data(shown: Sequence[Shown], maps: Sequence[PopulationMap] = ()) -> PageData:
    """Collect the content of the page: reports, and the maps of populations."""
    sources: dict[str, str] = {}
    rules: dict[tuple[str, str, str], int] = {}
    operators = []
    rows: list[dict[str, Any]] = []
    for one in shown:
        kernels = _kernels_of(one.folder, one.report.gpu)
        operators.append(_operator(one))
        for row in one.rows:
            kernel = kernels.get(row.report.chosen.record, row.report.chosen.source)
            path = one.folder / "kernels" / f"{kernel}.cu"
            if path.is_file():
                sources[kernel] = path.read_text(encoding="utf-8")
            rows.append(_row(len(rows), row, one, kernel if kernel in sources else "", rules))
    page = {
        "operators": operators,
        "rows": rows,
        "rules": [list(rule) for rule in rules],
        "roofs": _roofs(shown, rows),
        "maps": [map_data(one) for one in maps],
    }
    return PageData(page, sources)


def _kernels_of(folder: Path, gpu: str) -> dict[str, str]:
    """Digest of the kernel, by the identity of the winner's record, from the library's table."""
    path = folder / "tables" / f"{gpu}.yaml"
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    refuse_traps(text, str(path), RecordError)
    table = yaml.load(text, Loader=LOADER)
    return {str(row["record"]): str(row["kernel"]) for row in table.get("rows", ())}


def _operator(one: Shown) -> dict[str, Any]:
    passes = dict.fromkeys(row.report.pass_name for row in one.rows)
    return {
        "name": one.report.operator,
        "gpu": one.report.gpu,
        "summary": one.operator.summary if one.operator is not None else "",
        "environments": [
            {"id": key, "facts": list(environment_facts(e)), **asdict(e)}
            for key, e in one.report.environments.items()
        ],
        "passes": [
            {"name": name,
             "tally": str(Tally.of([r for r in one.rows if r.report.pass_name == name]))}
            for name in passes
        ],
        "compared": None if one.old is None else {
            "environments": differing_environments(one.old, one.report),
            "pairs": [_pair(pair) for pair in one.pairs],
        },
    }


def _pair(pair: Pair) -> dict[str, Any]:
    old, new = (e and _timing(e.chosen.timing) for e in (pair.old, pair.new))
    return {"name": pair.label, "pass": pair.pass_name, "change": pair.change,
            "old": old, "new": new, "ratio": pair.ratio}


def _row(
    number: int, row: ReportRow, one: Shown, kernel: str, rules: dict[tuple[str, str, str], int]
) -> dict[str, Any]:
    entry = row.report
    second = entry.runner_up
    search = search_of(one.searches, entry)
    fastest = row.fastest
    return {
        "id": number,
        "op": row.operator,
        "gpu": row.gpu,
        "pass": entry.pass_name,
        "name": row.label,
        "key": entry.problem,
        **shape_and_kind(row.label),
        **_timing(entry.chosen.timing),
        "protocol": entry.chosen.timing.protocol,
        "floor": entry.floor_us,
        "share": entry.floor_share,
        "peers": [{"name": p.name, **_timing(p.timing)} for p in entry.peers],
        "fastest": fastest.name if fastest else "",
        "ratio": row.ratio,
        "standing": standing(entry),
        "variant": entry.chosen.variant,
        "config": dict(entry.chosen.config),
        "label": entry.chosen.label,
        "record": entry.chosen.record,
        "remarks": list(entry.chosen.remarks),
        "kernels": [asdict(k) for k in entry.chosen.kernels],
        "accuracy": [asdict(a) for a in entry.accuracy],
        "second": second and {
            "label": Config.of(second.variant, second.config).label,
            "us": second.median_us, "ratio": second.ratio, "tie": runner_up_is_tie(entry),
            **_runner_up_interval(search, second.record, second.median_us),
        },
        "evidence": evidence_lines(entry),
        "repeat": repeat_commands(row, one.options),
        "environment": entry.environment,
        "l2": entry.l2,
        "slowed": entry.slowed,
        "space": [entry.space.feasible, entry.space.size],
        "refused": [
            [rules.setdefault((r.rule, r.why, r.where), len(rules)), r.configs]
            for r in entry.space.refused
        ],
        "fates": dict(entry.trials.fates),
        "reasons": dict(entry.trials.reasons),
        "seconds": [entry.trials.search_seconds, entry.trials.compile_seconds],
        "search": _search(search),
        "messages": _messages(search),
        "kernel": kernel,
        "same_text": kernel == entry.chosen.source,
        "work": _work(row, one),
    }


def _timing(timing: Timing) -> dict[str, Any]:
    """The time that counts; if there are several kinds of inputs, `inputs` lists all times."""
    found = {"us": timing.median_us, "low": timing.low_us, "high": timing.high_us}
    times = by_inputs(timing)
    return {**found, "inputs": times} if times else found


def _runner_up_interval(search: Search, record: str, median: float) -> dict[str, float]:
    """Quartiles of the runner-up, because reports keep only its median in the final.

    They are the quartiles of its trial, scaled so that the trial's median is the final's median.
    """
    own = next((r.timing for r in search.timed if r.id == record), None)
    if own is None or own.median_us <= 0:
        return {}
    scale = median / own.median_us
    return {"low": scale * own.low_us, "high": scale * own.high_us}


def _search(search: Search) -> dict[str, Any]:
    """Trials as columns: seconds since the first trial, time, fate, variant, values."""
    variants = list(dict.fromkeys(t.config.variant for t in search.trials))
    params: dict[str, dict[str, None]] = {name: {} for name in variants}
    for trial in search.trials:
        params[trial.config.variant].update(dict.fromkeys(n for n, _ in trial.config.values))
    fates = [fate.value for fate in Fate]
    start = _when(search.trials[0]) if search.trials else None
    trials = []
    for t in search.trials:
        values, when = t.config.as_dict(), _when(t)
        passed = (when - start).total_seconds() if when and start else None
        trials.append([
            None if passed is None else round(passed, 1),
            t.timing.median_us if t.timing and t.fate is Fate.VERIFIED else None,
            fates.index(t.fate.value),
            variants.index(t.config.variant),
            *(values.get(name) for name in params[t.config.variant]),
        ])
    return {"variants": variants, "params": {v: list(p) for v, p in params.items()},
            "fates": fates, "trials": trials}


def _when(record: Record) -> datetime | None:
    return datetime.fromisoformat(record.when) if record.when else None


def _messages(search: Search) -> list[dict[str, Any]]:
    """Full reasons of refused trials, each with the first config that it refused."""
    found: dict[str, list[Record]] = {}
    for trial in search.trials:
        if trial.reason:
            found.setdefault(trial.reason, []).append(trial)
    most = sorted(found.items(), key=lambda item: -len(item[1]))[:_MESSAGES]
    return [{"reason": why, "fate": of[0].fate.value, "count": len(of), "first": of[0].config.label}
            for why, of in most]


def _work(row: ReportRow, one: Shown) -> dict[str, Any] | None:
    """Least bytes and operations of the problem; None if the operator or the GPU is unknown."""
    if one.operator is None:
        return None
    try:
        problem = parse_problem(row.report.problem, one.operator.signature)
    except ProblemError:
        return None
    cost = one.operator.cost(row.report.pass_name, problem)
    profile = load_profiles().get(row.gpu)
    peak = rate_tflops(cost, profile) if profile is not None else 0.0
    return {"bytes": cost.bytes, "flops": cost.flops, "unit": cost.unit, "peak": peak}


def _roofs(shown: Sequence[Shown], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines above a roofline's points: copy bandwidth and peak rates of each GPU."""
    found = []
    for gpu in dict.fromkeys(one.report.gpu for one in shown):
        copies = [e.copy_gbps for one in shown if one.report.gpu == gpu
                  for e in one.report.environments.values() if e.copy_gbps]
        peaks = {r["work"]["unit"]: r["work"]["peak"] for r in rows
                 if r["gpu"] == gpu and r["work"] and r["work"]["peak"]}
        if copies:
            found.append({"gpu": gpu, "gbps": max(copies), "peaks": peaks})
    return found
