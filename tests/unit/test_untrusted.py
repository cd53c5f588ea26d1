"""Tables, expressions and templates are data: text from others cannot run code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import kgen
from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue
from kgen.emit.state import SCHEMA, read_safe, read_table
from kgen.errors import ExprError, RecordError, TemplateError
from kgen.model.expr import parse_expr
from kgen.model.problem import parse_problem
from kgen.model.space import Variant
from kgen.report.codec import decode_as
from kgen.report.model import Report

LIBRARY = Path(kgen.__file__).parents[1] / "generated" / "kgen_ops"
EVIL = '__import__("os").system("touch /tmp/owned")'


def all_tables() -> list[Path]:
    return sorted(LIBRARY.glob("*/tables/*.yaml"))


@pytest.mark.parametrize("path", all_tables(), ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_committed_tables_are_data(path: Path) -> None:
    assert read_table(path).rows
    assert read_safe(path.parents[1] / "safe.yaml")


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (("rows", 0, "plan", "launches", 0, "args", 0), EVIL, "rows[0].plan.launches[0].args[0]"),
        (("rows", 0, "plan", "launches", 0, "smem"), EVIL, "rows[0].plan.launches[0].smem"),
        (("rows", 0, "plan", "launches", 0, "grid", 0), "f'{x}'", "launches[0].grid.x"),
        (("rows", 0, "plan", "launches", 0, "kernel"), "k'); x(", "launches[0].kernel"),
        (("rows", 0, "plan", "conditions"), ["B.__class__"], "rows[0].plan.conditions[0]"),
        (("rows", 0, "kernel"), "../../../etc/passwd", "rows[0].kernel"),
        (("rows", 0, "variant"), "a\nimport os", "rows[0].variant"),
        (("rows", 0, "config"), {"chunk": "1'''"}, "rows[0].config.chunk"),
        (("rows", 0, "dims"), {"B); print(": 1}, "rows[0].dims"),
        (("gpu", "title"), 'H200"""\nimport os', "gpu.title"),
        (("gpu", "name"), "../h200", "gpu.name"),
        (("gpu", "facts"), {"sm_count": EVIL}, "gpu.facts.sm_count"),
    ],
)
def test_a_table_that_would_run_is_refused(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, place: str
) -> None:
    data = yaml.safe_load((LIBRARY / "wkv6" / "tables" / "h200.yaml").read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path = tmp_path / "h200.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(RecordError) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "((2**64)**64)**64",
        "'a' * 10**11",
        "'%0999999999d' % 1",
        "(1, 2) * 10**11",
        "x" + " + x" * 20_000,
        "(" * 5000 + "1" + ")" * 5000,
        "M\0",
    ],
)
def test_expressions_that_would_take_all_memory(text: str) -> None:
    with pytest.raises(ExprError):
        parse_expr(text)({"x": 1, "M": 1})


def test_names_may_hold_texts_that_nobody_calculates_with() -> None:
    assert parse_expr("2 if dtype == 'bf16' else 4")({"dtype": "bf16"}) == 2
    with pytest.raises(ExprError, match="no number"):
        parse_expr("dtype * M")({"dtype": "bf16", "M": 10**11})
    with pytest.raises(ExprError, match="bits"):
        parse_expr("((M**64)**64)**64")({"M": 3})


def variant_of(folder: Path, text: str) -> tuple[Path, Variant]:
    """rmsnorm's naive variant with another template."""
    entry = open_catalogue().entry("rmsnorm")
    templates = folder / "rmsnorm"
    shutil.copytree(entry.templates, templates)
    variant = replace(entry.space.safe_variant("forward"), params=(), safe=None)
    (templates / variant.template).write_text(text)
    return templates, variant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("//% for i in range(10**9)\nx\n//% endfor\n", "steps"),
        ("//% for i in range(99999)\n//% for j in range(99999)\n//% endfor\n//% endfor\n", "steps"),
        ("${'a' * 10**11}\n", "no number"),
        ("${'%0999999999d' % 1}\n", "no number"),
        ("${9**(9**9)}\n", "power"),
        ("${'a'|center(10**11)}\n", "center"),
        ("${''.__class__.__mro__}\n", "__class__"),
        ('#include "../../../../etc/passwd"\n', "etc/passwd"),
        ('#include "/etc/passwd"\n', "etc/passwd"),
        ("#include </etc/passwd>\n", "etc/passwd"),
        ("#include <../../secret.h>\n", "secret"),
        ("#include SOMETHING\n", "SOMETHING"),
    ],
)
def test_templates_that_would_take_all_time_or_read_elsewhere(
    tmp_path: Path, text: str, why: str
) -> None:
    entry = open_catalogue().entry("rmsnorm")
    templates, variant = variant_of(tmp_path, text)
    problem = parse_problem("M=8,N=64,dtype=fp32", entry.operator.signature)
    with pytest.raises(TemplateError, match=why):
        Renderer(include_dir()).render("rmsnorm", templates, variant, variant.config({}), problem)


_ALIASES = "x: &a0 [1]\n" + "".join(
    f"y{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_ALIASES + "rows: [{constants: [*a11]}]\n", "is an alias"),
        ("rules:\n- pass: forward\n  tree: &t {below: *t}\n", "is an alias"),
        ("[" * 200_000, "nested more than"),
        ("{a: " * 100_000, "nested more than"),
        ("!!python/object/apply:os.system [echo]", "does not have the format"),
    ],
    ids=["aliases", "recursive tree", "deep list", "deep mapping", "tag"],
)
@pytest.mark.parametrize("reader", ["table", "report"])
def test_yaml_without_end_is_refused(reader: str, text: str, message: str, tmp_path: Path) -> None:
    """libyaml ends the process on a file too deep; aliases of aliases have any size."""
    text = text if text[0] in "[{!" else f"schema: {SCHEMA}\n{text}"
    path = tmp_path / "h200.yaml"
    path.write_text(text, encoding="utf-8")
    wanted = message if reader == "table" or text[0] != "!" else "a report is a mapping"
    with pytest.raises(RecordError, match=wanted):
        _read(reader, path)


def _read(reader: str, path: Path) -> None:
    if reader == "table":
        read_table(path)
    else:
        decode_as(Report, path.read_text(encoding="utf-8"), path.name, SCHEMA, "tune again")


@pytest.mark.parametrize(
    "text", ["? [1]\n: 2\n", "operator: !!python/name:os.system x\n", f"operator: {'9' * 5000}\n"]
)
def test_a_report_of_other_kinds_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match="h200"):
        decode_as(Report, f"schema: 1\n{text}", "h200.yaml", 1, "tune again")
