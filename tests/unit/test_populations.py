"""Populations: the committed files, how a file is expanded, and the errors of mistakes in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kgen.catalogue import load_population, open_catalogue, population_names
from kgen.cli.arguments import population_problems
from kgen.cli.main import main
from kgen.errors import CatalogueError, PopulationError, ProblemError
from kgen.model.names import parse_short_name, short_name
from kgen.model.population import Population

CATALOGUE = open_catalogue()
NAMES = population_names(CATALOGUE)
COMMITTED = Path(__file__).resolve().parents[2] / "search_spaces" / "populations"
LINES = 150
PROBLEMS = 60

Load = Callable[[str], Population]

MODELS = """\
doc: Two models.
models:
  language:
    - {name: Small, N: 2048, source: a page}
    - {name: Large, N: 8192, source: another page}
calls:
"""
CALL = """\
  - operator: rmsnorm
    models: language
    passes: forward
    M: [1, 64]
    dtype: bf16
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(text: str) -> Population:
        file = tmp_path / "ours.yaml"
        file.write_text(text, encoding="utf-8")
        return load_population(str(file), CATALOGUE)

    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_committed_files_are_short(name: str) -> None:
    assert len((COMMITTED / f"{name}.yaml").read_text("utf-8").splitlines()) <= LINES


@pytest.mark.parametrize("operator", CATALOGUE.names)
def test_every_operator_has_a_population(operator: str) -> None:
    """Decode has no backward pass; whatever has one is trained, so it has a forward pass too."""
    found = [load_population(name, CATALOGUE) for name in NAMES]
    forward = {p for each in found for p in each.problems(operator, "forward")}
    backward = {p for each in found for p in each.problems(operator, "backward")}
    assert len(forward) >= PROBLEMS
    passes = [p.name for p in CATALOGUE.entry(operator).operator.signature.passes]
    assert bool(backward) == ("backward" in passes)
    assert not [p for p in backward if dict(p.dims).get("T") == 1]


@pytest.mark.parametrize("name", NAMES)
def test_problems_of_committed_files_have_short_names(name: str) -> None:
    for entry in load_population(name, CATALOGUE).entries:
        signature = CATALOGUE.operator(entry.operator).signature
        assert parse_short_name(short_name(entry.problem, signature), signature) == entry.problem
        assert entry.models


def test_extents_of_models_that_are_known() -> None:
    norms = load_population("rmsnorm", CATALOGUE)
    widths = {
        model: entry.problem.dim("N") for entry in norms.entries for model in entry.models
    }
    assert widths["Llama 3 8B"] == 4096
    assert widths["Gemma 3 27B"] == 5376
    assert widths["DeepSeek-V3"] == 7168
    assert widths["GPT-OSS 20B and 120B"] == 2880
    heads = {
        (model, entry.problem.dim("H"), entry.problem.dim("V"))
        for entry in load_population("rwkv6", CATALOGUE).entries
        for model in entry.models
    }
    assert heads == {("Finch 1.6B", 32, 64), ("Finch 3B", 40, 64), ("Finch 7B", 64, 64),
                     ("Finch 14B", 64, 64)}


def test_a_call_stands_for_all_combinations(load: Load) -> None:
    ours = load(MODELS + CALL)
    assert (ours.name, ours.operators) == ("ours", ("rmsnorm",))
    assert [str(p).removesuffix(",w_dtype=bf16,residual_dtype=none,rstd_dtype=none")
            for p in ours.problems("rmsnorm", "forward")] == [
        "M=1,N=2048,dtype=bf16", "M=64,N=2048,dtype=bf16",
        "M=1,N=8192,dtype=bf16", "M=64,N=8192,dtype=bf16",
    ]
    assert ours.problems("rmsnorm", "backward") == ()
    assert [model.source for model in ours.models] == ["a page", "another page"]


def test_all_passes_are_the_default(load: Load) -> None:
    ours = load(MODELS + CALL.replace("    passes: forward\n", ""))
    assert len(ours.problems("rmsnorm", "forward")) == 4
    assert ours.problems("rmsnorm", "backward") == ours.problems("rmsnorm", "forward")


def test_values_that_belong_together(load: Load) -> None:
    call = CALL.replace("M: [1, 64]\n    dtype: bf16", "M dtype: [[1, bf16], [64, fp16]]")
    ours = load(MODELS + call)
    assert [(p.dim("M"), p.dtype("dtype").name) for p in ours.problems("rmsnorm", "forward")] == [
        (1, "bf16"), (64, "fp16"), (1, "bf16"), (64, "fp16"),
    ]


def test_a_problem_of_two_models_is_there_once(load: Load) -> None:
    ours = load(MODELS.replace("8192", "2048") + CALL)
    assert [entry.models for entry in ours.entries] == [("Small", "Large")] * 2


def test_packed_sequences_and_dims_that_mostly_equal_others(load: Load) -> None:
    ours = load("""\
doc: Packed.
models:
  rwkv: [{name: Small, H: 2, K: 64, source: a page}]
calls:
  - operator: rwkv6
    models: rwkv
    B N T: [[1, 8, 1024]]
    dtype: bf16
    cu_seqlens_dtype: int32
""")
    (problem,) = ours.problems("wkv6", "forward")
    assert problem.shape(("B", "N", "T", "H", "K", "V")) == (1, 8, 1024, 2, 64, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ours.yaml:1: the file is empty"),
        ("doc: x\nmodels: {}\ncalls: []\n", "ours.yaml:2: the population is empty"),
        (MODELS.replace("doc: Two models.", "doc: ''") + CALL, "ours.yaml:1: 'doc' is empty"),
        (MODELS + "  []\n", "ours.yaml:6: the population is empty"),
        (MODELS.replace("source: a page", "source: ''") + CALL, "ours.yaml:4: 'source' is empty"),
        (MODELS.replace(", source: a page", "") + CALL, "ours.yaml:4: 'source' is missing"),
        (MODELS.replace("Large", "Small") + CALL, "ours.yaml:5: model 'Small' is listed twice"),
        (MODELS.replace("N: 8192", "K: 8192") + CALL, "ours.yaml:5: unknown name 'K'"),
        (MODELS.replace("calls:", "  speech: []\ncalls:") + CALL,
         "ours.yaml:6: the list of models is empty"),
        (MODELS.replace("calls:", "  speech: [{name: x, source: y}]\ncalls:") + CALL,
         "ours.yaml:6: no call names the models 'speech'"),
        (MODELS + CALL.replace("rmsnorm", "rmsnrom"),
         "ours.yaml:7: unknown operator 'rmsnrom'\n  did you mean 'rmsnorm'?"),
        (MODELS + CALL.replace("models: language", "models: languages"),
         "ours.yaml:8: unknown list of models 'languages'\n  did you mean 'language'?"),
        (MODELS + CALL.replace("    models: language\n", ""), "ours.yaml:7: 'models' is missing"),
        (MODELS + CALL.replace("passes: forward", "passes: [forwards]"),
         "ours.yaml:9: unknown pass 'forwards'\n  did you mean 'forward'?"),
        (MODELS + CALL.replace("passes: forward", "passes: [forward, forward]"),
         "ours.yaml:9: pass 'forward' is listed twice"),
        (MODELS + CALL.replace("M: [1", "MM: [1"), "ours.yaml:10: unknown name 'MM'"),
        (MODELS + CALL.replace("M: [1, 64]", "M: [1, -64]"),
         "ours.yaml:10: M=-64 is not a whole number >= 0"),
        (MODELS + CALL.replace("M: [1, 64]", f"M: {'9' * 5000}"),
         "ours.yaml:10: M=9+ is not a whole number >= 0 of at most 18 digits"),
        (MODELS + CALL.replace("M: [1, 64]", f"M: {list(range(10001))}"),
         "ours.yaml:7: the call stands for 10001 problems"),
        (MODELS + CALL.replace("M: [1, 64]", "M: []"), "ours.yaml:10: the list is empty"),
        (MODELS + CALL.replace("M: [1, 64]", "M: [1, 1]"), "ours.yaml:10: '1' is listed twice"),
        (MODELS + CALL.replace("M: [1, 64]", "M: 1\n    N: 64"),
         "ours.yaml:4: 'N' of model 'Small' is also given by the call"),
        (MODELS + CALL.replace("M: [1, 64]", "M rstd_dtype: [[1, fp32], [64]]"),
         "ours.yaml:10: 1 values for 'M rstd_dtype'"),
        (MODELS + CALL.replace("M: [1, 64]", "M: 1\n    M rstd_dtype: [[1, fp32]]"),
         "ours.yaml:11: 'M' is written twice"),
        (MODELS + CALL.replace("    M: [1, 64]\n", ""), "ours.yaml:7: .*'M' .rows. is missing"),
        (MODELS + CALL.replace("bf16", "bf61"),
         "ours.yaml:11: 'bf61' is no value of 'dtype'\n  did you mean 'bf16'? known: bf16, fp16"),
        (MODELS + CALL + "    w_dtype: fp16\n",
         "ours.yaml:7: .*'w_dtype=fp16' is not supported\n  allowed here: bf16, fp32, none"),
        (MODELS + CALL + CALL,
         "ours.yaml:12: rmsnorm forward M=1,N=2048.* of 'Small' is listed twice\n  first: .*:7"),
    ],
)
def test_mistakes(load: Load, text: str, message: str) -> None:
    with pytest.raises(PopulationError, match=message.replace("?", r"\?")):
        load(text)


def test_an_unknown_option_names_the_allowed_ones(load: Load) -> None:
    text = MODELS.replace("N:", "H: 1, K:") + """\
  - operator: wkv6
    models: language
    B: 1
    T: 8
    dtype: fp32
    decay_form: logs
"""
    with pytest.raises(PopulationError, match=r"yaml:12: 'logs' is no value.*\n.*decay, log, raw"):
        load(text)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(CatalogueError, match="did you mean 'rwkv6'"):
        load_population("rwkv66", CATALOGUE)
    with pytest.raises(PopulationError, match="cannot be read"):
        load_population("nowhere/ours.yaml", CATALOGUE)


def test_a_folder_of_ones_own_has_populations(tmp_path: Path) -> None:
    folder = tmp_path / "search_spaces" / "populations"
    folder.mkdir(parents=True)
    (folder / "rmsnorm.yaml").write_text(MODELS + CALL, encoding="utf-8")
    (folder / "ours.yaml").write_text(MODELS + CALL, encoding="utf-8")
    catalogue = open_catalogue([tmp_path])
    assert set(population_names(catalogue)) == {*NAMES, "ours"}
    assert load_population("rmsnorm", catalogue).doc == "Two models."


def test_passes_without_problems_are_left_out(load: Load) -> None:
    ours, operator = load(MODELS + CALL), CATALOGUE.operator("rmsnorm")
    assert list(population_problems(ours, operator, ["forward", "backward"])) == ["forward"]
    with pytest.raises(ProblemError, match="rmsnorm backward\n  it has: rmsnorm forward 4"):
        population_problems(ours, operator, ["backward"])


def test_printing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(MODELS + CALL, encoding="utf-8")
    assert main(["populations"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in NAMES)
    assert main(["populations", str(file), "--op", "rmsnorm"]) == 0
    printed = capsys.readouterr().out
    assert "  Small  a page\n  Large  another page\n" in printed
    assert "rmsnorm forward: 4 problems\n  M1 N2048 bf16\n" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "add --op OP"),
        (["tune", "--population", "rwkv6", "--problem", "T1"], "choose one"),
        (["tune", "--population", "rwkv66"], "unknown population 'rwkv66'"),
        (["tune", "--population", "rwkv6", "--op", "timex", "--gpu", "host"],
         "no problems of timex forward and backward\n  it has: wkv6 forward"),
        (["populations", "--op", "timex"], "add its name"),
        (["populations", "rwkv6", "--op", "timex"], "it has: wkv6 forward"),
    ],
)
def test_options_that_contradict(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
