"""The language of search-space files, form by form, and the message of each mistake.

`test_catalogue.py` has the plain forms: params, rules, first, safe, ladder, pdl.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from space_files import NAIVE, PARAMETERS, SIGNATURE, TEMPLATE, load, with_variant

from kgen.build.render import Renderer
from kgen.catalogue import profile_named
from kgen.errors import CatalogueError, SpaceError
from kgen.model.plan import expression_names, make_plan
from kgen.model.problem import parse_problem
from kgen.model.space import RuleKind, Space, Variant

PROBLEM = parse_problem("M=10,N=64,dtype=bf16", SIGNATURE)
H200 = profile_named("h200")


def example(space: Space) -> Variant:
    return space.variant("forward", "example")


def refused(folder: Path, text: str, **given: object) -> str:
    """The message of the mistake in a file."""
    with pytest.raises((SpaceError, CatalogueError)) as caught:
        load(folder, text, **given)  # type: ignore[arg-type]
    return str(caught.value)


def values(variant: Variant, **config: object) -> dict[str, object]:
    """What the variant's rules come to, by their text."""
    names = expression_names(variant, variant.config(config), PROBLEM, H200)  # type: ignore[arg-type]
    return {rule.condition.text: rule.condition(names) for rule in variant.requires}


# --- let -------------------------------------------------------------------------------------


def test_lets_of_all_levels(tmp_path: Path) -> None:
    """The nearest level wins: a variant's own, its groups', the pass's, the file's."""
    text = """\
operator: scale
let: {a1: 1, twice: 2 * a4}
groups:
  shared:
    let: {a3: 3}
passes:
  forward:
    let: {a2: 2, a3: 2, a4: 2}
    example:
      doc: One element per thread.
      use: [shared]
      let: {a4: 4}
      params: {threads: [128]}
      require:
        - {rule: a1 + 10 * a2 + 100 * a3 + 1000 * a4 + 10000 * twice, why: it does}
      launch: [{kernel: scale_forward, grid: M, block: threads}]
    other:
      doc: The same without the group.
      params: {threads: [128]}
      require:
        - {rule: a1 + 10 * a2 + 100 * a3 + 1000 * a4 + 10000 * twice, why: it does}
      launch: [{kernel: scale_forward, grid: M, block: threads}]
""" + NAIVE
    space = load(tmp_path, text)
    for name, wanted in (("example", 84321), ("other", 42221)):
        variant = space.variant("forward", name)
        (number,) = values(variant, threads=128).values()
        assert number == wanted  # `twice` sees the variant's own a4, too
        rule = variant.inlined(variant.requires[0].condition)
        assert rule.names == frozenset()
        assert rule({}) == wanted


@pytest.mark.parametrize(
    ("lets", "line", "message"),
    [
        ("{b: c, c: b}", 6, "let 'b' is defined by itself: b -> c -> b"),
        ("{b: b + 1}", 6, "let 'b' is defined by itself: b -> b"),
        ("{b: M * thraeds}", 6, "unknown name 'thraeds'.*did you mean 'threads'.*used at .*:7"),
        ("{b: M +}", 6, "'M \\+' is not an expression"),
        ("{b: 1, unused: 2}", 6, "let 'unused' is used by no variant\n  next: remove it"),
        ("{b: 1, N: 2}", 6, "'N' already means something else in expressions"),
        ("{b: x_ptr}", 6, "unknown name 'x_ptr'"),
        ("{b: 1, threads: 2}", 8, "'threads' is a let, too: .*scale.yaml:6"),
    ],
)
def test_mistakes_in_lets(tmp_path: Path, lets: str, line: int, message: str) -> None:
    entries = f"let: {lets}\nrequire: [{{rule: b, why: it does}}]\nparams: {{threads: [128]}}\n"
    # Mappings in braces have the line of their file's entry: 1 operator, 2 passes, ...
    text = with_variant("doc: An example.\n" + entries)
    found = refused(tmp_path, text)
    assert re.search(message, found, re.DOTALL), found
    assert f"scale.yaml:{line}:" in found


# --- groups ----------------------------------------------------------------------------------

GROUPS = """\
groups:
  threads:
    params:
      threads: [128, 256]
    require:
      - {rule: threads <= 1024, why: a block has at most 1024 threads}
    launch:
      - {kernel: scale_forward, grid: M, block: threads}
  vectors:
    use: [threads]
    params:
      vec: [1, 2]
    require:
      - {rule: N % vec == 0, why: whole vectors, name: whole}
    prefer:
      - {rule: vec > 1 or N < 64, why: narrow loads}
  nondeterministic_sums:
    nondeterministic: Sums are added in the order in which blocks end.
"""


def test_a_variant_uses_groups(tmp_path: Path) -> None:
    entries = """\
doc: An example.
use: [vectors, nondeterministic_sums]
params:
  threads: [64]
require:
  - {rule: N % (2 * vec) == 0, why: whole pairs, name: whole}
  - {rule: M > 0, why: own}
launch: [{kernel: scale_forward, smem: 4 * threads}]
"""
    text = with_variant(entries, head=GROUPS)
    variant = example(load(tmp_path, text, templates={"example": TEMPLATE + "// ${vec}\n"}))
    assert [(p.name, p.choices) for p in variant.params] == [("threads", (64,)), ("vec", (1, 2))]
    # A rule with the name of a group's rule replaces it in its place.
    assert [(r.condition.text, r.kind) for r in variant.requires] == [
        ("threads <= 1024", RuleKind.LEGALITY),
        ("N % (2 * vec) == 0", RuleKind.LEGALITY),
        ("vec > 1 or N < 64", RuleKind.EFFICIENCY),
        ("M > 0", RuleKind.LEGALITY),
    ]
    # A launch of a group's kernel has what the group says of it, and what it says itself.
    launch, = variant.launches
    assert [e.text for e in (*launch.grid, *launch.block, launch.smem)] == [
        "M", "threads", "4 * threads"]
    assert variant.nondeterministic.startswith("Sums are added")


def test_launches_of_groups(tmp_path: Path) -> None:
    """Without a list, a variant launches its groups' kernels; in a list, a name is enough."""
    second = 'extern "C" __global__ void scale_again(T* y, kgen::i64 N) {\n}\n'
    head = """\
groups:
  one: {launch: [{kernel: scale_forward, grid: M, block: threads}]}
  two: {launch: [{kernel: scale_again, grid: N, block: threads}]}
"""
    for entries, kernels in (
        ("use: [one, two]\n", ["scale_forward", "scale_again"]),
        ("use: [two, one]\n", ["scale_again", "scale_forward"]),
        ("use: [two, one]\nlaunch: [scale_forward, scale_again]\n",
         ["scale_forward", "scale_again"]),
        ("use: [one, two]\nlaunch: [scale_again, scale_forward, scale_again]\n",
         ["scale_again", "scale_forward", "scale_again"]),
    ):  # fmt: skip
        if "launch" not in entries:
            text = with_variant(f"{entries}launch:\n", head=head).replace("      launch:\n", "", 1)
        else:
            text = with_variant(entries, head=head)
        variant = example(load(tmp_path, text, templates={"example": TEMPLATE + second}))
        assert [launch.kernel for launch in variant.launches] == kernels


@pytest.mark.parametrize(
    ("entries", "head", "message"),
    [
        ("use: [vectros]\n", GROUPS, "unknown group 'vectros'\n  did you mean 'vectors'"),
        ("use: [b]\n", "groups: {b: {use: [c]}, c: {use: [b]}}\n", "uses itself: b -> c -> b"),
        ("use: [b]\n", "groups: {b: {}, c: {}}\n", "group 'c' is used by no variant.*next: remove"),
        ("use: [b]\n", "groups: {b: {doc: no}}\n", "unknown key 'doc'.*known: aligned, .*use"),
        ("use: [b]\n", "groups: {b: {safe: {}}}\n", "unknown key 'safe'"),
        ("use: [b]\n", "groups: {b: {launch: [k, k]}}\n", "launch 'k' is declared twice"),
        ("use: b\n", "groups: {b: {}}\n", "a list is expected here"),
        ("", "groups: [b]\n", "a mapping .* is expected here"),
    ],
)
def test_mistakes_in_groups(tmp_path: Path, entries: str, head: str, message: str) -> None:
    found = refused(tmp_path, with_variant(entries, head=head))
    assert re.search(message, found, re.DOTALL), found


# --- require, prefer, aligned ----------------------------------------------------------------


def test_prefer_is_efficiency(tmp_path: Path) -> None:
    entries = """\
require: [{rule: threads <= N, why: b}]
prefer: [{rule: threads > 128, why: a}]
"""
    variant = example(load(tmp_path, with_variant(entries)))
    assert [(r.kind, r.why) for r in variant.requires] == [
        (RuleKind.LEGALITY, "b"), (RuleKind.EFFICIENCY, "a")]


ALIGNED = """\
params: {threads: [128], vec: [1, 2, 4, 8]}
aligned: {x y: 16}
aligned_elements: {w: vec}
"""


@pytest.mark.parametrize(
    ("addresses", "holds"),
    [
        ({}, [True, True, True]),
        ({"x_ptr": 8}, [False, True, True]),
        ({"x_stride_M": 68}, [False, True, True]),  # 136 bytes of bf16
        ({"x_stride_M": 68, "M": 1}, [True, True, True]),  # no second row
        ({"y_ptr": 24}, [True, False, True]),
        ({"w_ptr": 8}, [True, True, False]),  # 2 elements of fp32, where vec is 4
    ],
)
def test_alignments_are_guards(
    tmp_path: Path, addresses: dict[str, int], holds: list[bool]
) -> None:
    templates = {"example": TEMPLATE + "// ${vec}\n"}
    variant = example(load(tmp_path, with_variant(ALIGNED), templates=templates))
    assert all(guard.why for guard in variant.guards)
    names = {
        "x_ptr": 0, "y_ptr": 32, "w_ptr": 64, "x_stride_M": 64, "M": 10, "itemsize": 2, "vec": 4,
        **addresses,
    }  # fmt: skip
    assert [bool(guard.condition(names)) for guard in variant.guards] == holds


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("aligned: {z: 16}\n", "'z' is no tensor of this pass\n  known: w, x, y"),
        ("aligned: {x: vec}\n", "unknown name 'vec'"),
        ("aligned: {x: 16}\naligned_elements: {x: 8}\n", "alignment of 'x' is written twice"),
        ("aligned: {x x: 16}\n", "alignment of 'x' is written twice"),
        ("aligned: [x]\n", "a mapping .* is expected here"),
        ("aligned: {x: 16}\nsafe: {threads: 128}\n", "neither 'constants' nor 'guard' or 'align"),
        ("guard: [{rule: x_ptr == 0, why: b}]\nsafe: {threads: 128}\n", "neither 'constants' nor"),
        ("guard: [{rule: z_ptr == 0, why: b}]\n", "unknown name 'z_ptr'.*did you mean '._ptr'"),
        ("require: [{rule: x_ptr == 0, why: b}]\n", "unknown name 'x_ptr'"),
        ("require: [{rule: M > 0, why: ''}]\n", "a rule must say why it holds"),
        ("require: [{rule: M > 0}]\n", "'why' is missing\n  required: rule, why"),
        ("prefer: [{rule: M > 0, why: b, kind: efficiency}]\n", "kind"),
        ("prefer: {rule: M > 0, why: b}\n", "a list is expected here"),
    ],
)
def test_mistakes_in_rules(tmp_path: Path, entries: str, message: str) -> None:
    found = refused(tmp_path, with_variant(entries))
    assert re.search(message, found, re.DOTALL), found
    assert "scale.yaml:" in found


# --- constants, workspaces, nondeterministic -------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("constants: [K]\n", "'K' is no dim\n  known: M, N"),
        ("workspace: [{name: x, dtype: fp32, elements: M}]\n", "'x' already names an argument"),
        ("workspace: [{name: s, dtype: fp23, elements: M}]\n", "unknown dtype 'fp23'.*mean 'fp32'"),
        ("workspace: [{name: s, dtype: fp32}]\n", "'elements' is missing"),
        (
            "workspace: [{name: s, dtype: fp32, elements: M}, "
            "{name: s, dtype: fp32, elements: N}]\n",
            "workspace 's' is declared twice",
        ),
        ("nondeterministic: ''\n", "say why launches on the same inputs may differ"),
        ("keeps_state: ''\n", "say why kernels may keep something between launches"),
        ("untested: {'row < M': ''}\n", "say why nothing need test what depends on `row < M`"),
        ("untested: [row]\n", "a mapping .* is expected here"),
        ("steady: {K: 64}\n", "'K' is no dim\n  known: M, N"),
        ("steady: {M: 2 * stages}\n", "unknown name 'stages'"),
        ("params: {threads: [128, null]}\n", "a choice may not be empty or null"),
        ("params: {threads: 128}\n", "a list is expected here"),
        ("launch: []\n", "'launch' is missing\n  required: doc, params, launch"),
        ("launch: [{kernel: scale_forward, block: 1}]\n", "launch 'scale_forward' has no 'grid'"),
        ("launch: [{kernel: scale_forward, grid: M, block: [1, 1, 1, 1]}]\n", "one to three"),
        ("launch: [{grid: M, block: 1}]\n", "'kernel' is missing"),
        ("unknown: 1\n", "unknown key 'unknown'.*known: .*doc.*safe"),
        ("safe: {threads: 128}\n", "exactly one variant of 'forward' must declare 'safe'.*found 2"),
    ],
)
def test_mistakes_in_entries(tmp_path: Path, entries: str, message: str) -> None:
    found = refused(tmp_path, with_variant(entries))
    assert re.search(message, found, re.DOTALL), found


def test_entries_that_proofs_read(tmp_path: Path) -> None:
    entries = """\
steady: {M: 2 * threads}
nondeterministic: >-
  Sums are added in the order
  in which blocks end.
keeps_state: A counter that each launch clears.
untested: {"row < M": There is a block for each row.}
"""
    variant = example(load(tmp_path, with_variant(entries)))
    assert [(dim, extent.text) for dim, extent in variant.steady] == [("M", "2 * threads")]
    assert variant.nondeterministic == "Sums are added in the order in which blocks end."
    assert variant.keeps_state == "A counter that each launch clears."
    assert variant.untested == (("row < M", "There is a block for each row."),)


def test_extents_with_commas(tmp_path: Path) -> None:
    """In a YAML list, a comma inside of a call ends an item; kgen puts it together again."""
    entries = "launch: [{kernel: scale_forward, grid: [ceil_div(M, 4), max(N, 2)], block: 32}]\n"
    variant = example(load(tmp_path, with_variant(entries)))
    (launch,) = make_plan(variant, variant.config({"threads": 128}), PROBLEM, H200).launches
    assert launch.grid == (3, 64, 1)
    assert launch.block == (32, 1, 1)


# --- arguments from the kernel's parameter list ----------------------------------------------


def with_kernel(parameters: str) -> dict[str, str]:
    return {"example": TEMPLATE.replace(PARAMETERS, parameters)}


def test_arguments_follow_the_parameter_list(tmp_path: Path) -> None:
    parameters = """const T* __restrict__ x,  // [M, N], rows x_stride_M apart
    float* partial,  /* [blocks, N] */
    T* y, i64 N, long long rows_per_block, float a, std::int64_t itemsize,
    kgen::i64 threads, const kgen::none* w"""
    entries = """\
let: {rows_per_block: M // 2}
workspace: [{name: partial, dtype: fp32, elements: 2 * N}]
"""
    templates = with_kernel(parameters)
    variant = example(load(tmp_path, with_variant(entries), templates=templates))
    (launch,) = variant.launches
    assert [a if isinstance(a, str) else a.text for a in launch.args] == [
        "x", "partial", "y", "N", "rows_per_block", "a", "itemsize", "threads", "w"]
    (made,) = make_plan(variant, variant.config({"threads": 128}), PROBLEM, H200).launches
    assert made.args == ("x", "partial", "y", "N", 5, "a", 2, 128, "w")


def test_a_launch_binds_parameters_by_other_names(tmp_path: Path) -> None:
    """One kernel serves two launches, with other tensors and numbers."""
    entries = """\
workspace: [{name: once, dtype: dtype, elements: M * N}]
launch:
  - {kernel: scale_forward, grid: M, block: threads, args: {to: once, columns: N, rows: 2 * M}}
  - {kernel: scale_forward, grid: M, block: threads, args: {from: once, columns: 7}}
"""
    entries = entries.replace("dtype: dtype", "dtype: bf16")
    templates = with_kernel("const T* from, T* to, kgen::i64 columns, kgen::i64 rows")
    text = with_variant(entries)
    for old, new in (("{to: once,", "{from: x, to: once,"), ("{from: once,", "{from: once, to: y,"),
                     ("columns: 7}", "columns: 7, rows: N - 1}")):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    variant = example(load(tmp_path, text, templates=templates))
    plan = make_plan(variant, variant.config({"threads": 128}), PROBLEM, H200)
    assert [launch.args for launch in plan.launches] == [
        ("x", "once", "N", 20), ("once", "y", 7, 63)]


def test_a_parameter_that_means_nothing_is_refused_with_both_lists(tmp_path: Path) -> None:
    templates = with_kernel("const T* x, T* yy, kgen::i64 N, kgen::i64 rows")
    found = refused(tmp_path, with_variant("let: {rws: M}\nrequire: [{rule: rws, why: b}]\n"),
                    templates=templates)  # fmt: skip
    template = tmp_path / "templates" / "scale" / "forward_example.cu.jinja"
    place, _, message = found.partition(": ")
    assert place.endswith("scale.yaml:9")
    assert message.splitlines() == [
        "kernel 'scale_forward' has parameters that mean nothing here: yy, rows",
        "  did you mean 'y'?",
        f"  its parameters ({template}:3): x, yy, N, rows",
        "  allowed: x, w, y, a, M, N, x_stride_M, rws, threads, itemsize",
        "  next: rename one, say `args: {yy: ...}`, or define a let",
    ]


@pytest.mark.parametrize(
    ("parameters", "launch", "message"),
    [
        ("const T* x, float N", "", r"'N' of kernel 'scale_forward' \(.*:3\) is a float, but 'N' is"
         " a 64-bit integer"),
        ("const T* a", "", "is a pointer, but 'a' is a float"),
        ("const T* x, int N", "", "parameter 'int N' of kernel 'scale_forward' has type 'int'.*"
         "pointers, kgen::i64 and float"),
        ("const T*", "", "has no name or type"),
        ("const T* x", "args: {z: x}", "kernel 'scale_forward' has no parameter 'z'\n  known: x"),
        ("const T* x", "args: {x: M * 2}", r"is a pointer, but 'M \* 2' is a 64-bit integer"),
        ("const T* x", "args: [z]", "unknown kernel argument 'z'"),
        ("const T* x", "smem: vec", "unknown name 'vec'"),
        ("const T* x,\n//% if dtype == 'bf16'\n  T* y,\n//% endif\n  kgen::i64 N", "",
         "depend on a config:\n  x, y, N\n  x, N\n  give it one list"),
        ("const T* x,\n//% for i in [1]\n  T* y\n//% endfor\n", "", "only `//% if`, not nested"),
        ("".join(f"//% if a{i}\nfloat a{i},\n//% endif\n" for i in range(7)) + "T* x", "",
         "more than 64 parameter lists"),
        ("const T* x, int (*f)(float", "", "a parenthesis is not closed"),
    ],
)  # fmt: skip
def test_mistakes_in_arguments(
    tmp_path: Path, parameters: str, launch: str, message: str
) -> None:
    given = f"{{kernel: scale_forward, grid: M, block: threads, {launch}}}"
    text = with_variant(f"launch: [{given}]\n")
    found = refused(tmp_path, text, templates=with_kernel(parameters))
    assert re.search(message, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE + 'extern "C" __global__ void more(T* y) {\n}\n',
         "does not launch kernel 'more' of its template\n  declared at .*:6; launch it, or take"),
        (TEMPLATE.replace("scale_forward", "scale_froward"),
         "the template has no kernel 'scale_forward'\n  did you mean 'scale_froward'"),
        (TEMPLATE + 'extern "C" __global__ void scale_forward(T* y) {\n}\n',
         "kernel 'scale_forward' is declared twice, differently"),
        (TEMPLATE.replace("scale_forward(", "= ("), "no kernel name follows"),
    ],
)  # fmt: skip
def test_mistakes_between_template_and_space(
    tmp_path: Path, template: str, message: str
) -> None:
    found = refused(tmp_path, with_variant(""), templates={"example": template})
    assert re.search(message, found, re.DOTALL), found


def test_a_kernel_in_both_branches_of_an_if(tmp_path: Path) -> None:
    """Alternatives of equal parameter lists are one kernel; comments hide kernels."""
    kernel = TEMPLATE.partition("\n\n")[2]
    template = (
        f"using T = ${{dtype}};\n//% if threads == 128\n{kernel}//% else\n{kernel}//% endif\n"
        '// extern "C" __global__ void old(T* z) {}\n'
    )
    (launch,) = example(load(tmp_path, with_variant(""), templates={"example": template})).launches
    assert launch.kernel == "scale_forward"


def test_a_variant_without_template_is_refused(tmp_path: Path) -> None:
    text = with_variant("", name="elsewhere")
    found = refused(tmp_path, text)
    assert "variant 'elsewhere' has no template\n  expected: " in found
    assert found.endswith("forward_elsewhere.cu.jinja")


# --- families --------------------------------------------------------------------------------

FAMILY = """\
family: scales
let:
  pairs: N // 2
groups:
  unused_here: {}
passes:
  forward:
    example:
      doc: A family's variant.
      params:
        threads: [128, 256]
        vec: [1, 2]
      require:
        - {rule: not per_row or vec == 1, why: one weight per row}
        - {rule: threads < 2048, why: few, name: few}
      launch:
        - {kernel: scale_forward, grid: M, block: threads}
""" + NAIVE
MEMBER = """\
operator: scale
family: scales
set: {per_row: true}
passes:
  forward:
    example:
      params:
        threads: [64]
      require:
        - {rule: threads * pairs > 0, why: fewer, name: few}
      first:
        - {threads: 64, vec: 1}
"""
FAMILY_TEMPLATE = TEMPLATE.replace(
    "float a)", "float a\n//% if per_row == 'true'\n  , kgen::i64 M\n//% endif\n)"
) + "// ${vec}, ${per_row}\n"


def test_a_member_of_a_family(tmp_path: Path) -> None:
    space = load(tmp_path, MEMBER, family=FAMILY, templates={"example": FAMILY_TEMPLATE})
    assert (space.family, space.template_folder) == ("scales", "scales")
    variant = example(space)
    assert variant.doc == "A family's variant."
    assert variant.settings == (("per_row", True),)
    assert [(p.name, p.choices) for p in variant.params] == [("threads", (64,)), ("vec", (1, 2))]
    assert values(variant, threads=64, vec=2) == {
        "not per_row or vec == 1": False, "threads * pairs > 0": True}
    # A setting decides the branches of a parameter list, and templates know it.
    assert [*variant.launches[0].args] == ["x", "w", "y", "N", "x_stride_M", "a", "M"]
    config = variant.config({"threads": 64, "vec": 1})
    rendered = Renderer(tmp_path).render(
        "scale", tmp_path / "templates" / "scales", variant, config, PROBLEM
    )
    assert "// 1, true" in rendered.source
    assert ", kgen::i64 M" in rendered.source
    other = MEMBER.replace("true", "false")
    variant = example(
        load(tmp_path, other, family=FAMILY, templates={"example": FAMILY_TEMPLATE}))
    assert len(variant.launches[0].args) == 6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("family: scales\n", "family: scalse\n",
         "no family 'scalse'\n  expected: .*scalse.yaml\n  did you mean 'scales'"),
        ("{per_row: true}", "{per-row: true}", "'per-row' cannot name a setting"),
        ("{per_row: true}", "{sm_count: 1}", "'sm_count' cannot name a setting"),
        ("{per_row: true}", "{per_row: null}", "may not be empty or null"),
        ("{per_row: true}", "{}", "parameters of kernel 'scale_forward' depend on a config"),
        ("family: scales\n", "", "unknown key 'set'"),
        ("passes:", "let: {unused: 1}\npasses:", "let 'unused' is used by no variant"),
        ("      params:\n", "      params:\n        per_row: [1]\n", "'per_row' cannot name"),
    ],
)
def test_mistakes_in_a_member(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MEMBER
    found = refused(tmp_path, MEMBER.replace(old, new, 1), family=FAMILY,
                    templates={"example": FAMILY_TEMPLATE})  # fmt: skip
    assert re.search(message, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("family: scales", "family: scale", "'scale' does not match the file's name 'scales'"),
        ("family: scales", "operator: scales", "unknown key 'operator'"),
        ("[1, 2]", "[1, 1]", "'vec' has a choice twice"),
        ("rule: not per_row", "rule: not per_rwo", "unknown name 'per_rwo'.*mean 'per_row'"),
    ],
)
def test_mistakes_in_a_family(tmp_path: Path, old: str, new: str, message: str) -> None:
    found = refused(tmp_path, MEMBER, family=FAMILY.replace(old, new, 1),
                    templates={"example": FAMILY_TEMPLATE})  # fmt: skip
    assert re.search(message, found, re.DOTALL), found
    assert "families/scales.yaml:" in found
