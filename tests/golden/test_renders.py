"""Rendered sources, byte for byte: a change of a template shows as a change of CUDA.

Rewrite after an intended change: KGEN_UPDATE_GOLDEN=1 pytest tests/golden
A golden file keeps the config that it names in its second line, as long as that config is feasible.
To choose another one, edit that line, then rewrite.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build.render import Renderer, check_template
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import EmptySpaceError, TemplateError
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.space import Variant
from kgen.runtime.spelling import spell
from kgen.search.feasible import enumerate_feasible, is_feasible

GOLDEN = Path(__file__).parent
CONFIG_LINE = "// config: "
VARIANTS = [
    (name, variant)
    for name in open_catalogue().names
    for variant in open_catalogue().entry(name).space.variants
]
each_variant = pytest.mark.parametrize(
    ("operator", "variant"), VARIANTS, ids=[f"{o}-{v.pass_name}-{v.name}" for o, v in VARIANTS]
)


def golden_file(operator: str, variant: Variant) -> Path:
    return GOLDEN / operator / f"{variant.pass_name}_{variant.name}.cu"


def kept_config(file: Path, variant: Variant) -> Config | None:
    """The config that a golden file names; None if there is none that the variant still has."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    label = next((s.removeprefix(CONFIG_LINE) for s in lines if s.startswith(CONFIG_LINE)), "")
    said = dict(part.split("=", 1) for part in label.partition("(")[2][:-1].split(", ") if part)
    values = {p.name: c for p in variant.params for c in p.choices if spell(c) == said.get(p.name)}
    if not {p.name for p in variant.params if p.default is None} <= values.keys():
        return None
    config = variant.config(values)
    return config if config.label == label else None


@lru_cache
def chosen(operator: str, pass_name: str, name: str) -> tuple[Config, Problem]:
    """The config of the golden file, with the first default problem that allows it.

    If there is none: the variant's first feasible guess, or its first feasible config.
    """
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature
    pass_ = signature.pass_named(pass_name)
    texts = entry.operator.default_problems(pass_name, on_host=False)
    problems = [parse_problem(text, signature) for text in texts]
    kept = kept_config(golden_file(operator, variant), variant)
    for gpu in (profile_named("h200"), profile_named("host")):  # some run on the CPU alone
        for problem in problems if kept is not None else ():
            assert kept is not None
            if is_feasible(variant, kept, pass_, problem, gpu):
                return kept, problem
        for problem in problems:
            try:
                configs = enumerate_feasible([variant], pass_, problem, gpu).configs
            except EmptySpaceError:
                continue
            feasible = set(configs)
            return next((c for c in variant.first if c in feasible), configs[0]), problem
    raise AssertionError(f"{variant.name} is feasible for no default problem")


def representative(operator: str, variant: Variant) -> Rendered:
    """The kernel of the chosen config."""
    entry = open_catalogue().entry(operator)
    config, problem = chosen(operator, variant.pass_name, variant.name)
    return Renderer(include_dir()).render(operator, entry.templates, variant, config, problem)


@each_variant
def test_render_is_golden(operator: str, variant: Variant) -> None:
    rendered = representative(operator, variant)
    assert representative(operator, variant) == rendered
    # The digest covers the device library's headers too; the golden file is about the template.
    text = rendered.source.partition("\n")[2]
    file = golden_file(operator, variant)
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


def test_every_golden_file_is_of_a_variant() -> None:
    wanted = {golden_file(operator, variant) for operator, variant in VARIANTS}
    left_over = {*GOLDEN.glob("*/*.cu")} - wanted
    if os.environ.get("KGEN_UPDATE_GOLDEN"):
        for file in left_over:
            file.unlink()
    else:
        assert not left_over


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
