"""`kgen bench`, run as a user runs it, on the host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kgen.bench import load_bench

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = ROOT / "docs" / "tutorials" / "softmax"
TEMPLATE = "mine/templates/softmax/forward_block_per_row.cu.jinja"
TUNED = "M=9,N=64,dtype=fp32"
UNTUNED = "M=5,N=64,dtype=fp32"


def name_of(problem: str) -> str:
    """The short name of a problem of `softmax`: `M9 N64 fp32`."""
    return problem.replace("dtype", "").replace("=", "").replace(",", " ")


def kgen(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kgen", *arguments],
        cwd=cwd,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def softmax(verb: str, *more: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return kgen(verb, "--op", "softmax", "--gpu", "host", "--path", "mine", *more, cwd=cwd)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(SOFTMAX, folder / "mine")
    done = softmax("tune", "--problem", TUNED, "--trials", "2", "--no-peers", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_tuned_and_an_untuned_problem(tuned: Path) -> None:
    problems = ("--problem", TUNED, "--problem", UNTUNED)
    done = softmax("bench", *problems, "--against", "eager", "--yaml", "b.yaml", cwd=tuned)
    assert done.returncode == 0, done.stderr
    report = load_bench(tuned / "b.yaml")
    assert (report.operator, report.gpu) == ("softmax", "host")
    assert report.environment.copy_gbps is not None
    first, second = report.contests
    assert first.problem == TUNED
    assert first.origin == "tuned"
    assert not first.remark
    assert second.origin == "safe"
    command = f"kgen tune --op softmax --gpu host --pass forward --problem {UNTUNED} --path mine"
    assert command in second.remark
    for contest in report.contests:
        assert [p.name for p in contest.peers] == ["eager"]
        assert contest.kernel.timing.median_us > 0
        assert contest.kernel.accuracy[0].error <= contest.kernel.accuracy[0].bound
        (accuracy,) = contest.peers[0].accuracy
        assert accuracy.output == contest.kernel.accuracy[0].output
        assert accuracy.error <= accuracy.bound
        assert f"{name_of(contest.problem)}, floor " in done.stdout
        assert contest.kernel.label in done.stdout
    assert "kgen, tuned" in done.stdout
    assert "kgen, safe" in done.stdout
    assert command in done.stdout
    # A bench only reads the files that tunes wrote.
    journal = tuned / "generated/kgen_ops/softmax/reports/host.trials.jsonl"
    assert UNTUNED not in journal.read_text()


def test_a_tuned_config_that_the_space_lost(tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned, tmp_path / "copy")
    space = tmp_path / "copy" / "mine" / "search_spaces" / "softmax.yaml"
    assert "params:" in space.read_text()
    report = tmp_path / "copy" / "generated/kgen_ops/softmax/reports/host.yaml"
    text = report.read_text()
    head, _, tail = text.partition("variant: block_per_row\n")
    assert tail
    report.write_text(f"{head}variant: forgotten\n{tail}")
    done = softmax("bench", "--problem", TUNED, "--against", "eager", cwd=tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    assert "tuned to forgotten(" in done.stdout
    assert "kgen, safe" in done.stdout


def test_a_kernel_that_went_wrong_is_refused(tuned: Path, tmp_path: Path) -> None:
    """It was verified when it was tuned; its template has changed since."""
    shutil.copytree(tuned, tmp_path / "copy")
    template = tmp_path / "copy" / TEMPLATE
    healthy = "kgen::from_float<T>(kgen::exp("
    assert healthy in template.read_text()
    template.write_text(
        template.read_text().replace(healthy, "kgen::from_float<T>(1.01f * kgen::exp(", 1)
    )
    arguments = ("--problem", TUNED, "--against", "eager", "--yaml", "wrong.yaml")
    done = softmax("bench", *arguments, cwd=tmp_path / "copy")
    assert done.returncode == 1, done.stdout
    assert "is wrong, so nothing was timed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "of floor" not in done.stdout
    assert not (tmp_path / "copy" / "wrong.yaml").exists()
    assert TUNED not in done.stdout


def test_the_published_ladder(tmp_path: Path) -> None:
    arguments = ("--op", "rmsnorm", "--gpu", "host", "--problem", "M=5,N=128,dtype=fp32")
    done = kgen("bench", *arguments, "--ladder", "--yaml", "ladder.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (ladder,) = load_bench(tmp_path / "ladder.yaml").ladders
    steps = ["naive", "shared memory", "warp", "float4 shared", "float4 warp"]
    assert [r.step for r in ladder.rungs] == steps
    assert all(r.timing for r in ladder.rungs)
    for rung in ladder.rungs:
        assert f"  {rung.step}  " in done.stdout
        assert rung.published in done.stdout
    assert not (tmp_path / "generated").exists()


def test_a_profile(tuned: Path) -> None:
    problems = ("--problem", TUNED, "--problem", UNTUNED)
    more = ("--profile", "--trace", "t/mine.pt.trace.json", "--yaml", "p.yaml")
    done = softmax("bench", *problems, "--against", "eager", *more, cwd=tuned)
    assert done.returncode == 0, done.stderr
    first, second = load_bench(tuned / "p.yaml").profiles
    # What was tuned is served by the library, whose function is traced beside its kernel.
    assert [c.name for c in first.contenders] == ["kgen", "kgen_ops", "eager"]
    assert [c.name for c in second.contenders] == ["kgen", "eager"]
    assert first.trace == "t/mine.forward-1.pt.trace.json"
    for profile in (first, second):
        events = json.loads((tuned / profile.trace).read_text())["traceEvents"]
        assert "contender: eager" in {event.get("name") for event in events}
        assert f"trace: {profile.trace}" in done.stdout


def test_what_calls_cost(tuned: Path) -> None:
    """Without --problem the smallest of the operator's; the library serves it, tuned or not."""
    done = softmax("bench", "--call-cost", "--against", "eager", "--yaml", "c.yaml", cwd=tuned)
    assert done.returncode == 0, done.stderr
    (table,) = load_bench(tuned / "c.yaml").calls
    assert [cost.name for cost in table.costs] == ["kgen_ops", "eager"]
    assert all(0 < c.low_us <= c.median_us <= c.high_us for c in table.costs)
    assert all(c.done_us > 0 for c in table.costs)
    assert table.launcher == "host"
    assert table.first_ms > 0
    assert f"forward {name_of(table.problem)}, a call without gradients" in done.stdout
    assert "GB/s" not in done.stdout


def test_calls_of_what_is_not_the_operator_are_refused(tuned: Path, tmp_path: Path) -> None:
    library = tmp_path / "generated" / "kgen_ops"
    shutil.copytree(tuned / "generated", tmp_path / "generated")
    shutil.copytree(tuned / "mine", tmp_path / "mine")
    done = softmax("bench", "--call-cost", "--problem", TUNED, "--out", "no", cwd=tmp_path)
    assert done.returncode == 1
    assert "no kgen_ops can be imported from there" in done.stderr
    module = library / "softmax" / "__init__.py"
    text = module.read_text()
    assert "def softmax(" in text
    module.write_text(f"{text}\n\n_right = softmax\n\n\ndef softmax(x):\n"
                      "    return _right(x) * 1.1\n")
    done = softmax("bench", "--call-cost", "--problem", TUNED, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "y is off by" in done.stderr
    assert "over kgen_ops" not in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
@pytest.mark.parametrize("operator", ["rmsnorm", "linear_attention", "timex", "wkv6"])
def test_what_calls_cost_on_the_gpu(operator: str) -> None:
    """Times are printed (run pytest with -s), not checked, because they depend on the machine."""
    done = kgen("bench", "--op", operator, "--call-cost", "--pass", "forward", cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "over kgen_ops" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--op", "rmsnorm", "--against", "eagre"], "did you mean 'eager'"),
        (["--op", "rmsnorm", "--against", "eager,"], "is not a list of names"),
        (["--op", "rmsnorm", "--against", "eager", "--ladder"], "not allowed with"),
        (["--op", "rmsnorm", "--profile", "--ladder"], "choose one"),
        (["--op", "rmsnorm", "--profile", "--call-cost"], "--profile and --call-cost are two"),
        (["--op", "rmsnorm", "--trace", "x.json"], "add --profile"),
        (["--op", "softmax", "--path", str(SOFTMAX), "--ladder"], "declares no ladder of forward"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], part: str) -> None:
    done = kgen("bench", "--gpu", "host", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
