"""Rendered sources, byte for byte: a change of a template shows as a change of CUDA.

Rewrite after an intended change: KGEN_UPDATE_GOLDEN=1 pytest tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import EmptySpaceError, TemplateError
from kgen.model.artifact import Rendered
from kgen.model.problem import parse_problem
from kgen.model.space import Variant
from kgen.render import Renderer
from kgen.render.render import check_template
from kgen.search.feasible import enumerate_feasible

GOLDEN = Path(__file__).parent
VARIANTS = [
    (name, variant)
    for name in open_catalogue().names
    for variant in open_catalogue().entry(name).space.variants
]
each_variant = pytest.mark.parametrize(
    ("operator", "variant"), VARIANTS, ids=[f"{o}-{v.pass_name}-{v.name}" for o, v in VARIANTS]
)


def representative(operator: str, variant: Variant) -> Rendered:
    """The variant's first feasible guess on the first default problem that allows it."""
    entry = open_catalogue().entry(operator)
    gpu = profile_named("h200")
    pass_ = entry.operator.signature.pass_named(variant.pass_name)
    for text in entry.operator.default_problems(variant.pass_name, on_host=False):
        problem = parse_problem(text, entry.operator.signature)
        try:
            configs = enumerate_feasible([variant], pass_, problem, gpu).configs
        except EmptySpaceError:
            continue
        config = next((c for c in variant.first if c in set(configs)), configs[0])
        return Renderer(include_dir()).render(operator, entry.templates, variant, config, problem)
    raise AssertionError(f"{variant.name} is feasible for no default problem")


@each_variant
def test_render_is_golden(operator: str, variant: Variant) -> None:
    rendered = representative(operator, variant)
    assert representative(operator, variant) == rendered
    # The digest covers the device library's headers too; the golden file is about the template.
    text = rendered.source.partition("\n")[2]
    file = GOLDEN / operator / f"{variant.pass_name}_{variant.name}.cu"
    if os.environ.get("KGEN_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.is_file(), "no golden file yet: KGEN_UPDATE_GOLDEN=1 pytest tests/golden"
    assert text == file.read_text(encoding="utf-8")


@each_variant
def test_reads_as_written_by_hand(operator: str, variant: Variant) -> None:
    source = representative(operator, variant).source
    for leftover in ("${", "//%", "/*#", "{{", "{%", "True", "None"):
        assert leftover not in source
    assert not any(line != line.rstrip() for line in source.splitlines())
    assert "\n\n\n" not in source


@each_variant
def test_template_uses_exactly_what_is_declared(operator: str, variant: Variant) -> None:
    entry = open_catalogue().entry(operator)
    check_template(entry.templates / variant.template, variant, entry.operator.signature)


def test_undeclared_and_unused_names_are_refused(tmp_path: Path) -> None:
    operator, variant = VARIANTS[0]
    entry = open_catalogue().entry(operator)
    original = (entry.templates / variant.template).read_text(encoding="utf-8")
    broken = tmp_path / variant.template
    broken.write_text(original + "\n// ${no_such_name}\n", encoding="utf-8")
    with pytest.raises(TemplateError, match="undeclared name 'no_such_name'"):
        check_template(broken, variant, entry.operator.signature)
    name = variant.params[0].name
    broken.write_text(original.replace("${" + name + "}", "1"), encoding="utf-8")
    with pytest.raises(TemplateError, match=f"'{name}' is never used"):
        check_template(broken, variant, entry.operator.signature)
    broken.write_text("//% if x\n", encoding="utf-8")
    with pytest.raises(TemplateError, match=r"cu\.jinja:"):
        check_template(broken, variant, entry.operator.signature)
