"""The worker's finals: a throttled comparison is repeated once, then reported as throttled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from kgen.catalogue import open_catalogue, profile_named
from kgen.emit.functions import pass_values
from kgen.errors import LaunchError
from kgen.measure.clocks import ClockState
from kgen.measure.compare import compare
from kgen.measure.sampler import TimedCall
from kgen.model.problem import parse_problem
from kgen.worker import Setup, runner
from kgen.worker.library import library_calls

OPERATOR = open_catalogue().entry("rmsnorm").operator
COOL = ClockState(1980, 3201, 1980, 40, 300.0, ("application clocks setting",))
HOT = ClockState(1200, 3201, 1980, 88, 700.0, ("application clocks setting", "power cap"))


@pytest.mark.parametrize(
    ("states", "comparisons", "slowed"),
    [
        ([COOL, COOL], 1, None),
        ([COOL, HOT, COOL, COOL], 2, None),
        ([HOT, COOL, COOL, HOT], 2, "power cap"),
        ([None, None], 1, None),
    ],
)
def test_throttled_comparison_is_repeated_once(
    monkeypatch: pytest.MonkeyPatch,
    states: list[ClockState | None],
    comparisons: int,
    slowed: str | None,
) -> None:
    answers, ran = iter(states), []
    monkeypatch.setattr(runner, "clocks", lambda device: next(answers))

    def counted(
        entrants: Mapping[str, Sequence[TimedCall]], device: torch.device, **_: object
    ) -> object:
        ran.append(1)
        return compare(entrants, device, rounds=1, warmup_ms=0.0)

    monkeypatch.setattr(runner, "compare", counted)
    worker = runner.Runner(OPERATOR, Setup("rmsnorm", (), profile_named("host"), 0, seed=1))
    result, texts = worker._compare({"a": [lambda: None]})
    assert len(ran) == comparisons
    assert list(answers) == []
    assert texts.get("slowed") == slowed
    assert list(result.timings) == ["a"]


@pytest.fixture
def unimported() -> Iterator[None]:
    """Hide a library that other tests have imported, and leave no trace of this test's."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_library(name)}
    path = list(sys.path)
    # Another one on the path would register its operators a second time, which torch refuses.
    sys.path[:] = [place for place in path if not Path(place, "kgen_ops").exists()]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if _is_library(name)]:
        del sys.modules[name]
    sys.modules.update(others)


def _is_library(module: str) -> bool:
    return module.split(".")[0] == "kgen_ops"


def library(folder: Path, body: str) -> Path:
    (folder / "kgen_ops").mkdir(parents=True)
    (folder / "kgen_ops" / "__init__.py").write_text(body)
    return folder


def test_library_calls_rotate_their_outputs(unimported: None, tmp_path: Path) -> None:
    body = "import torch\ncalls = []\ndef rmsnorm(x, w=None, eps=0.0, offset=0.0):\n" \
        "    calls.append((x, w, eps))\n    return torch.empty_like(x)\n"
    sets = [{"x": torch.ones(2, 3) * i, "w": torch.ones(3), "y": torch.ones(2, 3)} for i in (1, 2)]
    calls = library_calls(library(tmp_path / "a", body), OPERATOR, "forward", sets)
    for call in (*calls, *calls):
        call()
    taken = sys.modules["kgen_ops"].calls
    assert [float(x.mean()) for x, _, _ in taken] == [1.0, 2.0, 1.0, 2.0]
    assert {eps for _, _, eps in taken} == {OPERATOR.scalars("forward")["eps"]}
    with pytest.raises(LaunchError, match="start another"):
        library_calls(library(tmp_path / "b", body), OPERATOR, "forward", sets)


@pytest.mark.parametrize(
    ("pass_name", "dtypes", "given"),
    [
        ("forward", "", {"x", "w"}),
        ("forward", ",residual_dtype=fp32", {"x", "w", "residual"}),
        ("forward", ",rstd_dtype=fp32", {"x", "w", "return_rstd"}),
        (
            "forward",
            ",w_dtype=none,residual_dtype=fp32,rstd_dtype=fp32",
            {"x", "residual", "return_rstd"},
        ),
        ("backward", ",w_dtype=none,residual_dtype=fp32", {"dy", "x", "dh"}),
        ("backward", ",rstd_dtype=fp32", {"dy", "x", "w", "rstd"}),
    ],
)
def test_library_is_called_as_the_problem_has_it(
    unimported: None, tmp_path: Path, pass_name: str, dtypes: str, given: set[str]
) -> None:
    """Tensors that a problem leaves out are not passed, outputs that it has are asked for."""
    name = "rmsnorm" if pass_name == "forward" else "rmsnorm_backward"
    declared = OPERATOR.signature.pass_named(pass_name)
    problem = parse_problem(f"M=2,N=3,dtype=fp32{dtypes}", OPERATOR.signature)
    tensors = {t.name: torch.ones(problem.shape(t.dims)) for t in problem.present(declared).tensors}
    # The head of the function as it is emitted, so that a wrong keyword is an error here.
    head = pass_values(OPERATOR, declared)["head"]
    body = f"from typing import Any\nfrom torch import Tensor\ncalls = []\n{head}\n" \
        "    calls.append(dict(locals()))\n"
    (call,) = library_calls(library(tmp_path, body), OPERATOR, pass_name, [tensors])
    call()
    (taken,) = sys.modules["kgen_ops"].calls
    assert name in head
    for scalar, value in OPERATOR.scalars(pass_name).items():
        assert taken.pop(scalar) == value
    left_out = {key for key, value in taken.items() if value is None or value is False}
    assert set(taken) - left_out == given
    assert all(taken[key] is tensors.get(key, True) for key in given)


def test_library_that_lacks_the_function(unimported: None, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no function 'rmsnorm'"):
        library_calls(library(tmp_path, ""), OPERATOR, "forward", [])
    del sys.modules["kgen_ops"]
    with pytest.raises(LaunchError, match="no kgen_ops can be imported"):
        library_calls(tmp_path / "nothing", OPERATOR, "forward", [])
