"""Convert records to plain data and back. docs/journal-format.md documents the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.errors import RecordError
from kgen.model.config import Config
from kgen.model.record import (
    RANDOM,
    Evidence,
    Fate,
    HostRun,
    OtherTime,
    OutputAccuracy,
    Record,
    Resources,
    Timing,
    Tried,
)

FORMAT = 2
READABLE = (1, FORMAT)
"""Records of format 1 have no code digest: their key covers the rendered text instead."""


# Fields that are omitted if the trial was not built, and absent from records that are older than
# the field.
_OPTIONAL = ("key", "code", "definition", "guards", "trained")


def record_to_dict(record: Record) -> dict[str, Any]:
    """Return plain data; empty fields are left out."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "id": record.id,
        "key": record.key,
        "text_key": record.text_key,
        "operator": record.operator,
        "pass": record.pass_name,
        "problem": record.problem,
        "gpu": record.gpu,
        "variant": record.config.variant,
        "config": record.config.as_dict(),
        "fate": record.fate.value,
        "when": record.when,
        "source": record.source,
        "code": record.code,
        "definition": record.definition,
        "guards": record.guards,
        "trained": record.trained,
        "environment": record.environment,
    }
    data = {key: value for key, value in data.items() if value != "" or key not in _OPTIONAL}
    if record.reason:
        data["reason"] = record.reason
    if record.resources:
        data["resources"] = {
            kernel: [r.registers, r.spill_bytes, r.stack_bytes, r.smem_bytes]
            for kernel, r in record.resources
        }
    if record.timing:
        t = record.timing
        data["time_us"] = [_short(t.median_us), _short(t.low_us), _short(t.high_us)]
        data["samples"], data["protocol"] = t.samples, t.protocol
        if t.others:
            data["inputs"] = t.inputs
            data["other_us"] = {
                o.inputs: [_short(o.median_us), _short(o.low_us), _short(o.high_us)]
                for o in t.others
            }
    if record.accuracy:
        data["accuracy"] = {
            a.output: [
                _short(x) for x in (a.error, a.bound, a.eager_error, a.loss) if x is not None
            ]
            for a in record.accuracy
        }
    if record.evidence:
        data["evidence"] = _evidence_to_dict(record.evidence)
    return data


def record_from_dict(data: Mapping[str, Any]) -> Record:
    """Rebuild a record.

    Raises:
        RecordError: If the data do not have the documented format.
    """
    try:
        if data["format"] not in READABLE:
            raise RecordError(
                f"record format {data['format']} is not among {', '.join(map(str, READABLE))}"
            )
        is_old = data["format"] == 1
        return Record(
            key="" if is_old else str(data.get("key", "")),
            text_key=str(data["key"] if is_old else data["text_key"]),
            code=str(data.get("code", "")),
            definition=str(data.get("definition", "")),
            guards=str(data.get("guards", "")),
            trained=str(data.get("trained", "")),
            id=str(data.get("id", "")),
            operator=str(data["operator"]),
            pass_name=str(data["pass"]),
            problem=str(data["problem"]),
            gpu=str(data["gpu"]),
            config=Config.of(str(data["variant"]), dict(data["config"])),
            fate=Fate(data["fate"]),
            reason=str(data.get("reason", "")),
            source=str(data["source"]),
            environment=str(data["environment"]),
            resources=tuple(
                (k, Resources(*map(int, v))) for k, v in data.get("resources", {}).items()
            ),
            timing=_timing(data) if "time_us" in data else None,
            accuracy=tuple(
                OutputAccuracy(k, *map(float, v)) for k, v in data.get("accuracy", {}).items()
            ),
            evidence=_evidence(data["evidence"]) if "evidence" in data else None,
            when=str(data["when"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise RecordError(f"not a trial record: {type(problem).__name__}: {problem}") from None


def _timing(data: Mapping[str, Any]) -> Timing:
    median, low, high = map(float, data["time_us"])
    return Timing(
        median, low, high, int(data["samples"]), str(data["protocol"]),
        inputs=str(data.get("inputs", RANDOM)),
        others=tuple(
            OtherTime(str(inputs), *map(float, times))
            for inputs, times in data.get("other_us", {}).items()
        ),
    )  # fmt: skip


def _evidence_to_dict(evidence: Evidence) -> dict[str, Any]:
    data: dict[str, Any] = {
        "seed": evidence.seed,
        "tried": [[t.case, t.seed] for t in evidence.tried],
        "launches": evidence.launches,
        "bitwise": evidence.bitwise,
    }
    if evidence.skipped:
        data["skipped"] = list(evidence.skipped)
    if evidence.host:
        data["host"] = [
            {
                "compiler": run.compiler,
                "orders": list(run.orders),
                "tried": [[t.case, t.seed] for t in run.tried],
                **({"key": run.key} if run.key else {}),
            }
            for run in evidence.host
        ]
    if evidence.host_missing:
        data["host_missing"] = evidence.host_missing
    if evidence.rules:
        data["rules"] = evidence.rules
    return data


def _evidence(data: Mapping[str, Any]) -> Evidence:
    return Evidence(
        seed=int(data["seed"]),
        tried=_tried(data["tried"]),
        skipped=tuple(map(str, data.get("skipped", ()))),
        launches=int(data["launches"]),
        bitwise=bool(data["bitwise"]),
        host=tuple(
            HostRun(
                str(run["compiler"]),
                tuple(map(int, run["orders"])),
                _tried(run["tried"]),
                str(run.get("key", "")),
            )
            for run in data.get("host", ())
        ),
        host_missing=str(data.get("host_missing", "")),
        rules=str(data.get("rules", "")),
    )


def _tried(data: Sequence[Sequence[Any]]) -> tuple[Tried, ...]:
    return tuple(Tried(str(case), int(seed)) for case, seed in data)


def _short(value: float) -> float:
    """Round to six significant digits, which halves the journal's size."""
    return float(f"{value:.6g}")
