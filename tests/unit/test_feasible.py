"""Enumeration of the feasible set, against brute force."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.spaces import load_space
from kgen.errors import EmptySpaceError, SpaceError
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.space import Variant
from kgen.operators.rmsnorm import SIGNATURE
from kgen.search.feasible import enumerate_feasible, is_feasible, refusing_rule

SPACE = """\
operator: rmsnorm
passes:
  forward:
    plain:
      doc: One.
      constants: []
      params:
        threads: [32, 64, 2048]
        vec: [1, 2, 4]
        rows: [1, 2, 3]
      require:
        - rule: vec * itemsize <= 8
          why: a load moves at most 8 bytes here
        - rule: threads * rows <= 128 or threads > 1024
          why: small blocks
        - rule: M % rows == 0
          why: whole rows
      launch:
        - kernel: k
          grid: [ceil_div(M, rows), 1]
          block: [threads]
          smem: rows * 1024
          args: [x, y]
      safe: {threads: 32, vec: 1, rows: 1}
"""
PASS = SIGNATURE.passes[0]
H200 = profile_named("h200")


def plain(tmp_path: Path, text: str = SPACE) -> Variant:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(text)
    return load_space(file, "rmsnorm", SIGNATURE).variants[0]


def test_equals_brute_force(tmp_path: Path) -> None:
    variant = plain(tmp_path)
    problem = parse_problem("M=9,N=7,dtype=fp32", SIGNATURE)
    found = enumerate_feasible([variant], PASS, problem, H200)
    wanted = [
        Config.of("plain", {"threads": t, "vec": v, "rows": r})
        for t, v, r in itertools.product((32, 64, 2048), (1, 2, 4), (1, 2, 3))
        if v * 4 <= 8 and t * r <= 128 and 9 % r == 0
    ]
    assert list(found.configs) == wanted
    assert found.size == 27
    assert sum(r.configs for r in found.refusals) == 27 - len(wanted)
    assert any("1024 threads" in r.why or "out of CUDA's range" in r.why for r in found.refusals)
    for config in wanted:
        assert is_feasible(variant, config, PASS, problem, H200)
    assert not is_feasible(
        variant, Config.of("plain", {"threads": 32, "vec": 4, "rows": 1}), PASS, problem, H200
    )


def test_efficiency_refuses_only_in_a_search(tmp_path: Path) -> None:
    small = (
        "        - rule: threads * rows <= 128 or threads > 1024\n          why: small blocks\n"
    )
    launch = "      launch:\n"
    text = SPACE.replace(small, "").replace(launch, f"      prefer:\n{small}{launch}")
    variant = plain(tmp_path, text)
    problem = parse_problem("M=9,N=7,dtype=fp32", SIGNATURE)

    def refusal(legality_only: bool, **values: int) -> str:
        config = Config.of("plain", values)
        rule = refusing_rule(variant, config, PASS, problem, H200, legality_only=legality_only)
        allowed = is_feasible(variant, config, PASS, problem, H200, legality_only=legality_only)
        assert allowed == (rule is None)
        return "" if rule is None else rule.why

    assert refusal(False, threads=64, vec=1, rows=3) == "small blocks"
    assert refusal(True, threads=64, vec=1, rows=3) == ""
    assert refusal(True, threads=64, vec=4, rows=3).startswith("a load moves")
    assert "range" in refusal(True, threads=2048, vec=1, rows=1)  # the hardware's own limit
    found = enumerate_feasible([variant], PASS, problem, H200).configs
    assert Config.of("plain", {"threads": 64, "vec": 1, "rows": 3}) not in found


def test_empty_set_names_the_rules(tmp_path: Path) -> None:
    variant = plain(tmp_path, SPACE.replace("M % rows == 0", "M % rows == 5"))
    problem = parse_problem("M=9,N=7,dtype=fp32", SIGNATURE)
    with pytest.raises(EmptySpaceError) as caught:
        enumerate_feasible([variant], PASS, problem, H200)
    assert "whole rows" in str(caught.value)
    assert "rmsnorm.yaml:16" in str(caught.value)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("M % rows == 0", "dtype < rows", "rmsnorm.yaml:16: rule 'dtype < rows' cannot be evaluated"),
    ("ceil_div(M, rows)", "M // (rows - rows)", "rmsnorm.yaml:5: grid 'M // .*cannot be evaluated"),
])
def test_what_cannot_be_evaluated_has_a_place(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    problem = parse_problem("M=9,N=7,dtype=fp32", SIGNATURE)
    with pytest.raises(SpaceError, match=message):
        enumerate_feasible([plain(tmp_path, SPACE.replace(old, new))], PASS, problem, H200)


def test_an_empty_problem_is_feasible(tmp_path: Path) -> None:
    problem = parse_problem("M=0,N=7,dtype=fp16", SIGNATURE)
    assert enumerate_feasible([plain(tmp_path)], PASS, problem, H200).configs


def demand_space(operator: str, gpu: str, problems: slice) -> None:
    """Some default problems of each pass have enough configs, each once, and the safe one."""
    entry = open_catalogue().entry(operator)
    profile = profile_named(gpu)
    for pass_ in entry.operator.signature.passes:
        variants = entry.space.of_pass(pass_.name)
        for text in entry.operator.default_problems(pass_.name, profile.is_host)[problems]:
            problem = parse_problem(text, entry.operator.signature)
            found = enumerate_feasible(variants, pass_, problem, profile)
            # The host runs small problems with few threads: a rehearsal, not a search for speed.
            fewest = 5 if profile.is_host else 20
            assert len(found.configs) >= fewest, f"{problem} on {gpu}: {len(found.configs)}"
            assert len(set(found.configs)) == len(found.configs)
            safe = entry.space.safe_variant(pass_.name)
            assert safe.safe in found.configs


each_operator = pytest.mark.parametrize("operator", open_catalogue().names)


@each_operator
def test_the_first_default_problem_has_a_space(operator: str) -> None:
    demand_space(operator, "h200", slice(0, 1))


@pytest.mark.full  # large spaces: enumerating those of all problems takes minutes
@pytest.mark.parametrize("gpu", ["h200", "t4", "a100", "b200", "rtx_5090", "host"])
@each_operator
def test_every_default_problem_has_a_space_on_every_gpu(operator: str, gpu: str) -> None:
    demand_space(operator, gpu, slice(None))
