"""Files of captured calls: order, sums, and what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.catalogue import load_captured_calls, open_catalogue
from kgen.cli.main import main
from kgen.errors import CapturedCallsError

CATALOGUE = open_catalogue([])


def call(
    operator: str = "rmsnorm", problem: str = "M=8,N=16,dtype=fp32", calls: int = 3,
    median_us: str = "2.5", pass_name: str = "forward", step: str = "exact",
) -> str:
    return (f"  - operator: {operator}\n    pass: {pass_name}\n    problem: \"{problem}\"\n"
            f"    device: \"cpu\"\n    calls: {calls}\n    timed: 2\n    median_us: {median_us}\n"
            f"    step: {step}\n    config: \"rows(vec=1)\"\n")


def written(folder: Path, *calls: str, head: str = "format: 1\nsteps: 2\ncalls:\n") -> Path:
    file = folder / "calls.yaml"
    file.write_text(head + "".join(calls))
    return file


def test_the_most_costly_come_first(tmp_path: Path) -> None:
    timex = "B=2,C=3,T=4,dtype=fp32"
    found = load_captured_calls(written(
        tmp_path, call(calls=9, median_us="1.0"), call(problem="M=9,N=16,dtype=fp32", calls=2),
        call("timex", timex, 4, "100.0"), call("timex", timex, 5, "1.0", step="safe"),
        call("timex", timex, 1, "null", "backward"),
    ), CATALOGUE)
    assert found.steps == 2
    assert [entry.cost_us for entry in found.calls] == [400.0, 9.0, 5.0, 5.0, 0.0]
    population = found.population
    assert population.operators == ("timex", "rmsnorm")
    assert [str(p.dim("M")) for p in population.problems("rmsnorm", "forward")] == ["8", "9"]
    assert len(population.problems("timex", "forward")) == 1  # two steps served one problem
    assert len(population.problems("timex", "backward")) == 1


@pytest.mark.parametrize(
    ("calls", "head", "error"),
    [
        ((), "format: 2\ncalls: []\n", "calls.yaml:1: format 2 of captured calls is not known; "
         "this kgen reads format 1"),
        ((), "calls: []\n", "'format' is missing"),
        ((), "format: 1\nsteps: 1\ncalls: []\n", "no call was captured"),
        ((), "format: 1\nsteps: 0\ncalls: []\n", "steps: '0' is not a whole number > 0"),
        ((), "format: 1\nsteps: 1\ncall: []\n", "unknown key 'call'"),
        ((call("rmsnorn"),), None, "calls.yaml:4: unknown operator 'rmsnorn'"),
        ((call(problem="M=8,dtype=fp32"),), None, "calls.yaml:6: problem 'M=8,dtype=fp32': 'N'"),
        ((call(problem="M=8,N=16,dtype=fp8"),), None, "fp8"),
        ((call(pass_name="sideways"),), None, "calls.yaml:5: "),
        ((call(calls=-1),), None, "calls: '-1' is not a whole number > 0"),
        ((call(median_us="fast"),), None, "median_us: 'fast' is neither null nor a time"),
        ((call(median_us="-1.0"),), None, "median_us: '-1.0' is neither"),
    ],
)
def test_a_bad_file_says_where(
    tmp_path: Path, calls: tuple[str, ...], head: str | None, error: str
) -> None:
    file = written(tmp_path, *calls) if head is None else written(tmp_path, *calls, head=head)
    with pytest.raises(CapturedCallsError) as caught:
        load_captured_calls(file, CATALOGUE)
    assert error in str(caught.value)


def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, call())
    for arguments, error in [
        (["--calls", str(tmp_path / "none.yaml")], "cannot be read"),
        (["--calls", str(file), "--population", "rwkv6"], "--population and --calls choose"),
        (["--calls", str(file), "--problem", "M=1,N=1,dtype=fp32"], "--problem and --calls"),
        (["--calls", str(file), "--pass", "backward"], "has no backward problems"),
        (["--calls", str(file), "--op", "timex", "--gpu", "host"], "has no problems of timex"),
    ]:
        assert main(["tune", *arguments]) == 2
        assert error in capsys.readouterr().err
