"""A tune that dies in its last problem leaves a library with the problems before."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planting import compiler_for, plant

from kgen.catalogue import open_catalogue, profile_named
from kgen.emit.state import read_table
from kgen.errors import TuneError
from kgen.model.problem import parse_problem
from kgen.report import load_report
from kgen.tune import (
    PassPublished,
    TuneRequest,
    journal_path,
    publish,
    study_path,
    tune_and_publish,
)

FIRST, SECOND = "M=9,N=64,dtype=fp32", "M=9,N=96,dtype=fp32"
SECONDS = 240.0


def job(folder: Path, mine: Path, *problems: str) -> TuneRequest:
    """A tune of all configs, as `kgen tune` asks for it."""
    entry = open_catalogue([mine]).entry("planted")
    out, gpu = folder / "generated", profile_named("host")
    return TuneRequest(
        entry=entry,
        passes=("forward",),
        problems={
            "forward": tuple(parse_problem(p, entry.operator.signature) for p in problems)
        },
        gpu=gpu,
        ordinal=0,
        compiler=compiler_for("host"),
        journal=journal_path(reports(out), gpu),
        study=study_path(reports(out), gpu),
        trials=8,
        time_s=None,
        seed=0,
        paths=(str(mine),),
        against=(),
    )


def reports(out: Path) -> Path:
    return out / "kgen_ops" / "planted" / "reports"


def published(out: Path) -> list[str]:
    """Problems that have a row; the report must say the same."""
    rows = read_table(out / "kgen_ops" / "planted" / "tables" / "host.yaml").rows
    found = [f"M={dict(r.dims)['M']},N={dict(r.dims)['N']},dtype=fp32" for r in rows]
    assert [p.problem for p in load_report(reports(out) / "host.yaml").problems] == found
    return found


def files(out: Path) -> dict[str, bytes]:
    """All files that were emitted or reported, without the journal and the study."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and "trials" not in path.name
        and "optuna" not in path.name
    }


def use(out: Path) -> str:
    """Call the library in a process of its own; return what it prints about both problems."""
    script = (
        "import torch, kgen_ops\n"
        "for n in (64, 96):\n"
        "    x = torch.randn(9, n)\n"
        "    want = x.flip(-1) + x.sum(-1, keepdim=True)\n"
        "    torch.testing.assert_close(kgen_ops.planted(x), want, rtol=1e-4, atol=1e-4)\n"
        "    print(kgen_ops.explain('planted', M=9, N=n, dtype='fp32', device='cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(out)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_tune_leaves_the_problems_before(tmp_path: Path) -> None:
    mine = plant(tmp_path, ["none"])
    command = [sys.executable, "-m", "kgen", "tune", "--op", "planted", "--path", str(mine)]
    command += ["--gpu", "host", "--no-peers", "--problem", FIRST, "--problem", SECOND]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("[2/2]")), "")
        process.kill()
    assert said, "it never came to the second problem"
    out = tmp_path / "generated"
    assert published(out) == [FIRST]
    assert use(out)

    # The same tune continues, and in the end its files do not show that it had published before.
    events = list(tune_and_publish(job(tmp_path, mine, FIRST, SECOND), out, reports(out)))
    (result,) = [event.result for event in events if isinstance(event, PassPublished)]
    assert published(out) == [FIRST, SECOND]
    at_once = tmp_path / "at once" / "generated"
    publish(result, at_once, reports(at_once))
    assert files(at_once) == files(out)
    # Rows of problems that a later tune has not come to yet stay.
    publish(replace(result, results=result.results[:1]), out, reports(out))
    assert files(out) == files(at_once)


def test_a_problem_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    mine = plant(tmp_path, ["none", "unwritten"])
    space = mine / "search_spaces" / "planted.yaml"
    rule = "and threads in [64]) or N == 67"
    text = space.read_text()
    assert rule in text
    wrong_for_second = "and threads in [64] and (N == 96) == (fault == 'unwritten')) or N == 67"
    space.write_text(text.replace(rule, wrong_for_second))
    wanted, out = job(tmp_path, mine, FIRST, SECOND), tmp_path / "generated"
    with pytest.raises(TuneError, match=r"N=96.*no config was verified"):
        list(tune_and_publish(wanted, out, reports(out)))
    assert published(out) == [FIRST]
    assert use(out)
