"""A tune first tries what the library runs now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from kgen.catalogue import open_catalogue, profile_named
from kgen.model.problem import parse_problem
from kgen.search.feasible import enumerate_feasible
from kgen.trial import Session
from kgen.tune import TuneRequest, served_configs
from kgen.tune.engine import _PassTune
from kgen.tune.recorded_winners import EarlierRecords

GENERATED = Path(__file__).resolve().parents[2] / "generated"

# In a process of its own: one can load one library.
ASK = """
import sys
from pathlib import Path
from kgen.catalogue import open_catalogue, profile_named
from kgen.model.problem import parse_problem
from kgen.tune import served_configs
entry = open_catalogue().entry("rmsnorm")
asked = [parse_problem(text, entry.operator.signature) for text in sys.argv[2:]]
found = served_configs(Path(sys.argv[1]), entry, {"forward": asked}, profile_named("h200"))
for (name, problem), config in found.items():
    print(name, problem, config.label, sep="|")
"""


def served(folder: Path, *problems: str) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", ASK, str(folder), *problems],
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines()]


def test_configs_of_rows_and_of_families_are_those_of_the_search_space() -> None:
    row, family = served(GENERATED, "M=8192,N=4096,dtype=bf16", "M=2048,N=2560,dtype=bf16")
    entry = open_catalogue().entry("rmsnorm")
    variants = entry.space.of_pass("forward")
    for name, text, label in (row, family):
        assert name == "forward"
        problem = parse_problem(text, entry.operator.signature)
        pass_ = entry.operator.signature.pass_named("forward")
        feasible = enumerate_feasible(variants, pass_, problem, profile_named("h200"))
        assert label in {config.label for config in feasible.configs}


def test_a_folder_that_cannot_be_asked_gives_none(tmp_path: Path) -> None:
    problem = "M=8192,N=4096,dtype=bf16"
    assert served(tmp_path, problem) == []
    (tmp_path / "kgen_ops").mkdir()
    (tmp_path / "kgen_ops" / "__init__.py").write_text("raise ImportError('damaged')\n")
    assert served(tmp_path, problem) == []
    entry = open_catalogue().entry("rmsnorm")
    asked = {"forward": [parse_problem(problem, entry.operator.signature)]}
    assert served_configs(GENERATED, entry, asked, profile_named("host")) == {}


def test_the_served_config_is_tried_first() -> None:
    entry, gpu = open_catalogue().entry("rmsnorm"), profile_named("h200")
    problem = parse_problem("M=2048,N=2560,dtype=bf16", entry.operator.signature)
    pass_ = entry.operator.signature.pass_named("forward")
    space = enumerate_feasible(entry.space.of_pass("forward"), pass_, problem, gpu)
    tune = object.__new__(_PassTune)
    tune._session = cast(Session, SimpleNamespace(pass_name="forward"))
    tune._spaces, tune._problems = [space], (problem,)
    tune._results, tune._earlier = [], EarlierRecords("forward", (), ())
    other = next(c for c in space.configs if c.variant == "rows_in_registers")
    for config, is_moved in ((other, True), (None, False)):
        served = {} if config is None else {("forward", str(problem)): config}
        tune._request = cast(TuneRequest, SimpleNamespace(entry=entry, served=served))
        first = tune._first_trials(0).configs
        assert (first[0] == other) == is_moved
