"""Discovery, search-space files and their errors."""

from __future__ import annotations

import re
import symtable
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.assets import builtin_root
from kgen.catalogue import RESERVED_NAMES, load_profiles, open_catalogue, profile_named
from kgen.catalogue.spaces import load_space
from kgen.errors import CatalogueError, GpuError, SpaceError
from kgen.model.config import Config
from kgen.model.expr import parse_expr
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.model.space import RuleKind
from kgen.operators.rmsnorm import SIGNATURE

SPACE = """\
operator: rmsnorm
passes:
  forward:
    plain:
      doc: One thread per row.
      params:
        threads: [32, 64]
        cache: [normal, streaming]
        flag: [false, true]
      require:
        - rule: threads <= M
          why: idle threads
      launch:
        - kernel: rmsnorm_forward
          grid: [ceil_div(M, threads)]
          block: [threads]
          args: [x, w, y, M, N, x_stride_M, eps]
      first:
        - {threads: 64, cache: streaming, flag: true}
      safe: {threads: 32, cache: normal, flag: false}
"""


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(text)
    return load_space(file, "rmsnorm", SIGNATURE)


def test_a_space_loads(tmp_path: Path) -> None:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(SPACE)
    space = load_space(file, "rmsnorm", SIGNATURE)
    (variant,) = space.of_pass("forward")
    assert variant.size == 8
    assert variant.template == "forward_plain.cu.jinja"
    assert variant.safe == Config.of("plain", {"threads": 32, "cache": "normal", "flag": False})
    assert variant.requires[0].where.endswith("rmsnorm.yaml:11")
    assert space.safe_variant("forward") is variant


@pytest.mark.parametrize(
    ("old", "new", "line", "part"),
    [
        ("threads <= M", "thraeds <= M", 11, "unknown name 'thraeds'.*did you mean 'threads'"),
        ("threads <= M", "threads <= x_ptr", 11, "unknown name 'x_ptr'"),
        ("threads <= M", "__import__('os')", 11, "calls '__import__'"),
        ("          why: idle threads\n", "", 11, "'why' is missing"),
        ("[32, 64]", "[]", 7, "no choices"),
        ("[32, 64]", "[32, 32]", 7, "twice"),
        ("        flag:", "        threads:", 9, "'threads' is written twice"),
        ("        flag:", "        sm_count:", 9, "cannot name a parameter"),
        ("x_stride_M, eps]", "x_stride_N, eps]", 17, "unknown kernel argument 'x_stride_N'"),
        ("safe: {threads: 32,", "safe: {threads: 33,", 20, "threads=33 is not among"),
        ("  forward:", "  forwards:", 3, "unknown pass 'forwards'"),
        ("operator: rmsnorm", "operator: timex", 1, "does not match"),
        ("      doc:", "      docs:", 5, "unknown key 'docs'"),
        ("grid: [ceil_div(M, threads)]", "grid: []", 15, "one to three"),
        ("[normal, streaming]", "[normal, streaming", 9, "not valid YAML"),
        ("[32, 64]", "[32, .nan]", 7, "'.nan' is no finite number"),
        ("[32, 64]", "[" * 100_000, 7, "nested more than 100 levels deep"),
    ],
)
def test_mistakes_have_a_line(tmp_path: Path, old: str, new: str, line: int, part: str) -> None:
    assert old in SPACE
    with pytest.raises(SpaceError) as caught:
        load(tmp_path, SPACE.replace(old, new, 1))
    message = str(caught.value)
    assert f"rmsnorm.yaml:{line}:" in message, message
    assert re.search(part, message, re.DOTALL), message


LADDER = """\
ladder:
  - step: naive
    published: "91.4 % of 3300 GB/s, H100"
    pass: forward
    variant: plain
    config: {threads: 64, cache: normal, flag: false}
  - step: streaming stores
    pass: forward
    variant: plain
    config: {threads: 64, cache: streaming, flag: false}
    note: flag was
      not published
"""


def test_a_ladder_loads(tmp_path: Path) -> None:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(SPACE + LADDER)
    first, second = load_space(file, "rmsnorm", SIGNATURE).ladder
    assert first.name == "naive"
    assert first.pass_name == "forward"
    assert first.published == "91.4 % of 3300 GB/s, H100"
    assert first.config == Config.of("plain", {"threads": 64, "cache": "normal", "flag": False})
    assert first.where.endswith("rmsnorm.yaml:22")
    assert (second.published, second.note) == ("", "flag was not published")
    assert first.is_published
    assert second.is_published, "a note is for readers alone"
    file.write_text(f"{SPACE}{LADDER}    own: true\n")
    assert not load_space(file, "rmsnorm", SIGNATURE).ladder[1].is_published


@pytest.mark.parametrize(
    ("old", "new", "line", "part"),
    [
        ("variant: plain", "variant: plan", 25, "no variant 'plan'.*did you mean 'plain'"),
        ("pass: forward", "pass: backward", 24, "unknown pass 'backward'.*known: forward"),
        ("threads: 64", "threads: 65", 26, "threads=65 is not among its choices"),
        ("threads: 64, ", "", 26, "'threads' is missing"),
        ("    pass: forward", "    own: yes please\n    pass: forward", 24, "expected 'own: true'"),
        ("    pass: forward", "    own: true\n    pass: forward", 24, "has no published figure"),
        ("published:", "publsihed:", 23, "unknown key 'publsihed'"),
        ("step: naive", "step: ''", 22, "needs the name"),
        ("step: streaming stores", "step: naive", 27, "has a step 'naive' already"),
    ],
)
def test_mistakes_in_a_ladder_have_a_line(
    tmp_path: Path, old: str, new: str, line: int, part: str
) -> None:
    assert old in LADDER
    with pytest.raises(SpaceError) as caught:
        load(tmp_path, SPACE + LADDER.replace(old, new, 1))
    message = str(caught.value)
    assert f"rmsnorm.yaml:{line}:" in message, message
    assert re.search(part, message, re.DOTALL), message


def test_rules_have_a_kind_by_the_list_that_they_are_in(tmp_path: Path) -> None:
    file = tmp_path / "rmsnorm.yaml"
    for key, kind in (("require", RuleKind.LEGALITY), ("prefer", RuleKind.EFFICIENCY)):
        file.write_text(SPACE.replace("      require:\n", f"      {key}:\n"))
        (rule,) = load_space(file, "rmsnorm", SIGNATURE).variants[0].requires
        assert rule.kind is kind


@pytest.mark.parametrize("key", ["require", "prefer", "guard"])
def test_no_rule_has_a_key_kind(tmp_path: Path, key: str) -> None:
    rules = f"      {key}:\n        - {{rule: N % 4 == 0, why: traps, kind: efficiency}}\n"
    rule = "      require:\n        - rule: threads <= M\n          why: idle threads\n"
    text = SPACE.replace(rule, "")
    with pytest.raises(SpaceError, match=r"rmsnorm.yaml:11: unknown key 'kind'"):
        load(tmp_path, text.replace("      launch:\n", rules + "      launch:\n"))


@pytest.mark.parametrize("key", ["overlaps", "early"])
def test_keys_from_before_pdl_are_refused(tmp_path: Path, key: str) -> None:
    text = WITH_PDL.replace("pdl: overlap == 1\n", f"{key}: overlap == 1\n")
    wanted = rf"rmsnorm.yaml:21: unknown key '{key}'\n  next: write `pdl:`"
    with pytest.raises(SpaceError, match=wanted):
        load(tmp_path, text)


def test_safe_excludes_constants(tmp_path: Path) -> None:
    text = SPACE.replace("      params:\n", "      constants: [N]\n      params:\n", 1)
    with pytest.raises(SpaceError, match="correct for every problem"):
        load(tmp_path, text)


FIRST, SECOND = "pdl: overlap == 1 and flag", "pdl: overlap == 1\n"  # of the launches below

# Two kernels with programmatic dependent launch, where parameters with a default say so: the second
# relative to the first, and the first relative to whatever precedes the plan.
WITH_PDL = (
    SPACE.replace(
        "        flag: [false, true]\n",
        "        flag: [false, true]\n        overlap: {choices: [0, 1], default: 0}\n",
    )
    .replace(
        "        - kernel: rmsnorm_forward\n",
        "        - kernel: rmsnorm_forward\n          pdl: overlap == 1 and flag\n",
    )
    .replace(
        "      first:\n",
        """\
        - kernel: rmsnorm_scale
          pdl: overlap == 1
          grid: [M]
          block: [threads]
          args: [y, M, N]
      first:
        - {threads: 64, cache: normal, flag: true, overlap: 1}
        - {threads: 32, cache: normal, flag: true, overlap: 0}
""",
    )
    # The safe variant runs on every GPU, so no launch of it has `pdl`: another variant is safe.
    .replace("      safe: {threads: 32, cache: normal, flag: false}\n", "")
    + """\
    other:
      doc: One thread per row.
      params:
        threads: [32]
      launch:
        - kernel: rmsnorm_forward
          grid: [ceil_div(M, threads)]
          block: [threads]
          args: [x, w, y, M, N, x_stride_M, eps]
      safe: {threads: 32}
"""
)


def test_a_default_is_left_out_of_configs(tmp_path: Path) -> None:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(WITH_PDL)
    variant = load_space(file, "rmsnorm", SIGNATURE).variant("forward", "plain")
    assert variant.size == 16
    said, brief, unsaid = variant.first
    assert said.as_dict() == {"threads": 64, "cache": "normal", "flag": True, "overlap": 1}
    assert brief == Config.of("plain", {"threads": 32, "cache": "normal", "flag": True})
    assert "overlap" not in unsaid.as_dict()
    assert variant.values(brief)["overlap"] == 0
    assert variant.values(said)["overlap"] == 1
    assert variant.config(variant.values(brief)) == brief
    assert variant.config(dict(reversed(said.values))) == said
    # So it is the same config, under the same name, as before the parameter was there.
    before = load_space(_written(tmp_path, SPACE), "rmsnorm", SIGNATURE).variants[0]
    assert before.config(brief.as_dict()).digest == brief.digest


def _written(folder: Path, text: str) -> Path:
    file = folder / "before" / "rmsnorm.yaml"
    file.parent.mkdir()
    file.write_text(text)
    return file


def test_a_launch_has_pdl_where_its_config_says_so(tmp_path: Path) -> None:
    file = tmp_path / "rmsnorm.yaml"
    file.write_text(WITH_PDL)
    variant = load_space(file, "rmsnorm", SIGNATURE).variant("forward", "plain")
    problem = parse_problem("M=64,N=32,dtype=fp32", SIGNATURE)
    overlapping, plain, _ = variant.first
    h200, host = profile_named("h200"), profile_named("host")
    for config, gpu, wanted in (
        (overlapping, h200, [True, True]),
        (overlapping, host, [True, True]),
        (plain, h200, [False, False]),
        (plain, profile_named("a100"), [False, False]),
    ):
        plan = make_plan(variant, config, problem, gpu)
        assert [launch.pdl for launch in plan.launches] == wanted
    unflagged = variant.config({**variant.values(overlapping), "flag": False})
    plan = make_plan(variant, unflagged, problem, h200)
    assert [launch.pdl for launch in plan.launches] == [False, True]
    refusal = r"'rmsnorm_scale' .*'pdl: overlap == 1'.*sm_90 .*sm_80\n.*next:"
    with pytest.raises(SpaceError, match=refusal):
        make_plan(variant, unflagged, problem, profile_named("a100"))
    refusal = r"'rmsnorm_forward' .*'pdl: overlap == 1 and flag'.*sm_90 .*sm_80\n.*next:"
    with pytest.raises(SpaceError, match=refusal):
        make_plan(variant, overlapping, problem, profile_named("a100"))
    # The kernel of a later launch expects its predecessor in the plan: where all before it are
    # empty it must not overlap what precedes the plan.
    first, second = variant.launches
    empty = replace(variant, launches=(replace(first, grid=(parse_expr(0),)), second, second))
    plan = make_plan(empty, overlapping, problem, h200)
    assert [launch.pdl for launch in plan.launches[1:]] == [False, True]


@pytest.mark.parametrize(
    ("old", "new", "line", "part"),
    [
        (SECOND, "pdl: lap == 1\n", 21, "'rmsnorm_scale' .*'lap' is no parameter.*mean 'overlap'"),
        (SECOND, "pdl: M > 1\n", 21, "'rmsnorm_scale' has 'pdl: M > 1', but 'M' is no parameter"),
        (SECOND, "pdl: 1 == 1\n", 21, "'pdl: 1 == 1', which is the same .*allowed: .* over"),
        (SECOND, "pdl: overlap = 1\n", 21, "overlap = 1"),
        ("default: 0", "default: 2", 10, "overlap=2 is not among its choices.*allowed: 0, 1"),
        (", default: 0", "", 10, "'default' is missing.*required: choices, default"),
        ("default:", "defualt:", 10, "unknown key 'defualt'.*did you mean 'default'"),
        ("overlap: 1}", "overlap: 3}", 26, "overlap=3 is not among its choices.*allowed: 0, 1"),
        (
            "      first:\n",
            "      safe: {threads: 32, cache: normal, flag: false}\n      first:\n",
            25,
            "'safe' must run on every GPU.*'pdl'.*next: take it out",
        ),
        (
            f"          {SECOND}          grid: [M]\n          block: [threads]\n"
            "          args: [y, M, N]\n      first:\n",
            "          grid: [M]\n          block: [threads]\n          args: [y, M, N]\n"
            "      safe: {threads: 32, cache: normal, flag: false}\n      first:\n",
            24,
            "'safe' must run on every GPU.*'pdl'.*next: take it out",
        ),
        (FIRST, "pdl: lap == 1", 16, "'rmsnorm_forward' has 'pdl: .*'lap' is no parameter"),
        (FIRST, "pdl: M > 8 and flag", 16, "'rmsnorm_forward' has .*'M' is no parameter"),
        (FIRST, "pdl: 1 == 1", 16, "'rmsnorm_forward' has 'pdl: 1 == 1', which is the same"),
        (SECOND, f"{SECOND}          {SECOND}", 22, "'pdl' is written twice"),
    ],
)
def test_mistakes_in_pdl_have_a_line(
    tmp_path: Path, old: str, new: str, line: int, part: str
) -> None:
    assert old in WITH_PDL
    with pytest.raises(SpaceError) as caught:
        load(tmp_path, WITH_PDL.replace(old, new, 1))
    message = str(caught.value)
    assert f"rmsnorm.yaml:{line}:" in message, message
    assert re.search(part, message, re.DOTALL), message


def test_profiles_cover_the_named_gpus() -> None:
    profiles = load_profiles()
    for name in (
        "a100",
        "a100_40gb",
        "h100",
        "h100_pcie",
        "h200",
        "b200",
        "l40s",
        "rtx_3090",
        "rtx_4090",
        "rtx_5090",
        "t4",
        "a10",
        "host",
    ):
        assert name in profiles
    assert profiles["h200"].compute_capability == 90
    assert profiles["h200"].sm_count == 132
    assert profiles["host"].is_host
    # One device name must not mean two GPUs.
    names = [d for p in profiles.values() for d in p.device_names]
    assert len(names) == len(set(names))


def test_unknown_gpu_lists_known() -> None:
    with pytest.raises(GpuError, match="did you mean 'h200'"):
        profile_named("h20")


def test_operators_spaces_and_templates_match_one_to_one() -> None:
    """An operator of a family has the family's templates."""
    catalogue = open_catalogue()
    entries = [catalogue.entry(name) for name in catalogue.names]
    for entry in entries:
        files = {p.name for p in entry.templates.glob("*.jinja")}
        assert files == {v.template for v in entry.space.variants}
    root = entries[0].root
    families = {entry.space.family for entry in entries} - {""}
    assert {p.stem for p in root.search_spaces.glob("*.yaml")} == set(catalogue.names)
    assert {p.stem for p in (root.search_spaces / "families").glob("*.yaml")} == families
    folders = {p.name for p in root.templates.iterdir() if p.is_dir()} - {"include"}
    assert folders == {entry.space.template_folder for entry in entries}


def test_unknown_operator() -> None:
    with pytest.raises(CatalogueError, match="did you mean 'rmsnorm'"):
        open_catalogue().operator("rmsnrom")


def declared(change: str) -> str:
    """A module of an operator whose declaration has a mistake."""
    return (
        "import dataclasses\nfrom kgen.operators.rmsnorm import OPERATOR\n"
        f"OPERATOR = dataclasses.replace(OPERATOR, name='mine', {change})\n"
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("import nonexistent_module_xyz\n", "does not load.*nonexistent_module_xyz"),
        ("x = 1\n", "defines no OPERATOR"),
        ("from kgen.operators.rmsnorm import OPERATOR\n", "OPERATOR.name is 'rmsnorm'"),
        ("class Own(BaseException): pass\nraise Own('why')\n", "does not load.*Own: why"),
        (declared("definition=None"), "OPERATOR.definition is None\n  allowed: a function"),
        (declared("cost=lambda problem: 1"), r"OPERATOR.cost is <lambda>\(problem\)"),
        (declared("cases='peaked'"), "OPERATOR.cases is 'peaked'\n  allowed: a tuple"),
        (declared("problems={'host': 'M=1'}"), r"OPERATOR.problems\['host'\] is 'M=1'"),
        (declared("slab_dim='Q'"), "OPERATOR.slab_dim names 'Q', which is no dim"),
    ],
)
def test_broken_user_operator(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "mine.py").write_text(text)
    with pytest.raises(CatalogueError) as caught:
        open_catalogue([tmp_path]).operator("mine")
    assert re.search(part, str(caught.value), re.DOTALL)


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="is not a folder"):
        open_catalogue([tmp_path / "nowhere"])
    with pytest.raises(CatalogueError, match="neither operators/ nor search_spaces/"):
        open_catalogue([tmp_path])


def test_names_that_the_library_needs_name_no_operator(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators" / "nn.py").write_text("")
    with pytest.raises(CatalogueError, match="no operator can be named 'nn'"):
        open_catalogue([tmp_path]).operator("nn")


def test_reserved_names_are_those_that_generated_modules_use() -> None:
    """An operator of such a name would hide what its own module, or the package, uses."""
    package = builtin_root().templates.parent / "generated" / "kgen_ops"
    used: set[str] = set()
    tables = [symtable.symtable((package / operator / "__init__.py").read_text(), operator, "exec")
              for operator in open_catalogue().names]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols()
                 if s.is_imported() or (s.is_global() and s.is_referenced())}
    whole = symtable.symtable((package / "__init__.py").read_text(), "kgen_ops", "exec")
    used |= {s.get_name() for s in whole.get_symbols() if s.is_imported()}
    own = {name for op in open_catalogue().names for name in (op, f"{op}_backward")}
    clash = {name for name in used if re.fullmatch("[a-z][a-z0-9_]*", name)} - own
    assert clash <= RESERVED_NAMES
