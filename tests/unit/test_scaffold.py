"""`kgen new-op`: the files that it writes are an operator whose kernels pass the verifier."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer, check_template
from kgen.catalogue import Entry, open_catalogue, profile_named
from kgen.cli.main import main
from kgen.errors import OptionError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.runtime import nvrtc
from kgen.scaffold import write_operator
from kgen.search.feasible import enumerate_feasible
from kgen.worker.messages import Candidate, Setup, Trial
from kgen.worker.runner import Runner

NAME = "swish_2"
HOST = profile_named("host")
# Of each variant: a ragged problem, and the config with the widest vectors there.
WIDE = {"vectors": "M=5,N=264,dtype=bf16", "naive": "M=5,N=67,dtype=fp16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command has written."""
    folder = tmp_path_factory.mktemp("mine")
    assert main(["new-op", NAME, "--path", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def entry(folder: Path) -> Entry:
    return open_catalogue([folder]).entry(NAME)


def test_the_files(folder: Path, entry: Entry) -> None:
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()
             and p.suffix != ".pyc"}  # fmt: skip
    templates = {f"templates/{NAME}/{v.template}" for v in entry.space.variants}
    assert files == {f"operators/{NAME}.py", f"search_spaces/{NAME}.yaml", *templates}
    for file in files:
        text = (folder / file).read_text()
        assert re.search(r"@[A-Z]+@", text) is None, file
        assert max(map(len, text.splitlines())) <= 100, file
    space = (folder / "search_spaces" / f"{NAME}.yaml").read_text()
    for key in ("groups:", "use:", "require:", "prefer:", "aligned_elements:", "safe:"):
        assert key in space


def test_both_passes_and_a_vectorised_variant(entry: Entry) -> None:
    passes = {v.pass_name: [] for v in entry.space.variants}  # type: ignore[var-annotated]
    for variant in entry.space.variants:
        passes[variant.pass_name].append(variant.name)
        check_template(entry.templates / variant.template, variant, entry.operator.signature)
    assert passes == {"forward": ["vectors", "naive"], "backward": ["vectors", "naive"]}


def wanted(entry: Entry) -> list[tuple[str, str, str, Config]]:
    """(pass, variant, problem, config) of each variant."""
    found = []
    for variant in entry.space.variants:
        problem = parse_problem(WIDE[variant.name], entry.operator.signature)
        pass_ = entry.operator.signature.pass_named(variant.pass_name)
        configs = enumerate_feasible([variant], pass_, problem, HOST).configs
        widest = max(configs, key=lambda c: int(c.as_dict().get("vec", 1)))
        assert variant.name == "naive" or widest.as_dict()["vec"] == 8
        found.append((variant.pass_name, variant.name, WIDE[variant.name], widest))
    return found


def test_every_variant_passes_on_the_host(folder: Path, entry: Entry) -> None:
    """With all input cases, against float64; ragged extents, strided rows, NaN-filled outputs."""
    renderer, runner = Renderer(include_dir()), Runner(
        entry.operator, Setup(NAME, (str(folder),), HOST, 0, seed=1)
    )
    trials, requests = [], []
    for pass_name, name, text, config in wanted(entry):
        variant = entry.space.variant(pass_name, name)
        problem = parse_problem(text, entry.operator.signature)
        rendered = renderer.render(NAME, entry.templates, variant, config, problem)
        requests.append(BuildRequest(rendered, "host"))
        trials.append((pass_name, problem, variant, config))
    compiler = open_compiler("host", [include_dir()])
    builds = compiler.build(requests)
    compiler.close()
    for (pass_name, problem, variant, config), built in zip(trials, builds, strict=True):
        assert isinstance(built, Artifact), built
        outcome = runner.trial(
            Trial(pass_name, problem, Candidate(variant, config, built), level="certify",
                  measure=False, orders=(0, 1))
        )  # fmt: skip
        assert outcome.fate is Fate.VERIFIED, f"{variant.name} {config.label}\n{outcome.reason}"


@pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
def test_every_variant_compiles_for_gpus_without_spills(entry: Entry) -> None:
    renderer = Renderer(include_dir())
    requests = []
    for pass_name, name, text, config in wanted(entry):
        variant = entry.space.variant(pass_name, name)
        problem = parse_problem(text, entry.operator.signature)
        rendered = renderer.render(NAME, entry.templates, variant, config, problem)
        requests += [BuildRequest(rendered, arch) for arch in ("sm_80", "sm_90a")]
    compiler = open_compiler("nvrtc", [include_dir()], jobs=1)
    for built in compiler.build(requests):
        assert isinstance(built, Artifact), built
        assert all(used.spill_bytes == 0 for _, used in built.resources)
    compiler.close()


@pytest.mark.parametrize("name", ["torch", "nn", "base", "explain"])
def test_names_that_the_library_needs(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' cannot name an operator: the library needs"):
        write_operator(name, tmp_path, ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["2fast", "Swish", "a-b", "class", ""])
def test_names_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="cannot name an operator\n  allowed: lower-case"):
        write_operator(name, tmp_path, ())
    assert [*tmp_path.iterdir()] == []


def test_what_exists_is_kept(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is an operator 'rmsnorm' already"):
        write_operator("rmsnorm", tmp_path, open_catalogue().names)
    written = write_operator(NAME, tmp_path, ())
    written[0].write_text("mine")
    with pytest.raises(OptionError, match=r"exists; nothing was written\n  next: remove it"):
        write_operator(NAME, tmp_path, ())
    assert written[0].read_text() == "mine"
    assert write_operator("other", tmp_path, ())
