"""`kgen learn` on the host layer: from two tuned rows to a rule that the library follows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kgen.emit import published_table
from kgen.journal import Journal
from kgen.learn import load_learning
from kgen.model.record import Fate

COMMON = ("--op", "rmsnorm", "--gpu", "host", "--pass", "forward", "--seed", "0")


def kgen(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kgen", *arguments], cwd=cwd, env={**os.environ},
                          capture_output=True, text=True, timeout=240, check=False)


def test_from_rows_to_a_rule(tuned: Path, tmp_path: Path) -> None:
    untuned = kgen("learn", *COMMON, cwd=tmp_path)
    assert untuned.returncode == 2
    assert "rmsnorm was not tuned for host" in untuned.stderr
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    second = kgen("tune", *COMMON, "--trials", "3", "--no-peers", "--problem",
                  "M=3,N=128,dtype=fp32", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    # N = 256 was not tuned: it has rows only if the configs of other problems are measured there.
    done = kgen("learn", *COMMON, "--points", "5", "--held-out", "2", "--trials", "3", "--problem",
                "M=20,N=256,dtype=fp32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    reports = tmp_path / "generated" / "kgen_ops" / "rmsnorm" / "reports"
    report = load_learning(reports / "learnt" / "host.yaml")
    assert len(report.held_out) == 2
    assert report.verdict is not None
    assert 0.0 <= report.verdict.mean_loss <= report.verdict.worst_loss
    assert all(found.best_us <= found.rule_us for found in report.held_out)
    table = published_table(tmp_path / "generated", "rmsnorm", "host")
    assert [dict(rule.constants)["N"] for rule in table.rules] == [128, 256]
    records = {record.id: record for record in Journal(reports / "host.trials.jsonl").read()}
    rows = {row.record: row for row in table.rows}
    for rule, told in zip(table.rules, report.rules, strict=True):
        assert rule.records <= set(rows)
        assert rule.problems == len(told.training) >= 2
        assert all(entry.loss >= 0.0 for entry in told.training)
        rows_of = [int(entry.problem.split(",")[0].removeprefix("M=")) for entry in told.training]
        assert rule.extents == (("M", min(rows_of), max(rows_of)),)
    learnt = [row for row in table.rows if row.origin == "learnt"]
    assert 256 in [dict(row.dims)["N"] for row in learnt]
    for row in learnt:
        certificate = records[row.record]
        assert certificate.fate is Fate.VERIFIED
        assert certificate.evidence is not None
    # Held-out problems are searched, and get no row.
    with_rows = {",".join(f"{n}={v}" for n, v in (*row.dims, *row.dtypes)) for row in table.rows}
    for found in report.held_out:
        assert found.record in {*rows, "safe"}
        assert found.problem in {record.problem for record in records.values()} - with_rows

    nothing = kgen("learn", *COMMON, "--only", "dtype=fp16", cwd=tmp_path)
    assert nothing.returncode == 1
    assert "no forward rows of dtype=fp16\n" in nothing.stderr
    unknown = kgen("learn", *COMMON, "--only", "K=64", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "--only 'K=64': unknown name 'K'" in unknown.stderr

    told_so = kgen("explain", "--op", "rmsnorm", "--problem", "M=21,N=256,dtype=fp32",
                   cwd=tmp_path)
    assert told_so.returncode == 0, told_so.stderr
    assert "on host: learnt" in told_so.stdout
    assert "learnt from" in told_so.stdout
    assert kgen("report", cwd=tmp_path).returncode == 0
