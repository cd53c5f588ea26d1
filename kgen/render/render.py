"""Render a variant's template for a config and a problem.

Delimiters are chosen so that a template reads as CUDA: `${name}`, line statements `//% if`,
comments `/*# #*/` (Jinja's own `{{` and `{%` occur in CUDA initialisers and PTX).
"""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
import jinja2.meta

from kgen.errors import TemplateError, suggest
from kgen.model.artifact import Rendered
from kgen.model.config import Config, spell
from kgen.model.digest import digest_of_text
from kgen.model.dtypes import spelled
from kgen.model.problem import Problem
from kgen.model.signature import Signature
from kgen.model.space import Variant

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{3,}")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="/*%",
        block_end_string="%*/",
        comment_start_string="/*#",
        comment_end_string="#*/",
        line_statement_prefix="//%",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # the output is CUDA, not HTML
    )


class Renderer:
    """Renders templates; keeps parsed templates and header digests for its lifetime."""

    def __init__(self, include_dir: Path) -> None:
        self._include_dir = include_dir
        self._environment = _environment()
        self._templates: dict[Path, jinja2.Template] = {}
        self._names: dict[Path, set[str]] = {}
        self._headers: dict[str, tuple[str, ...]] = {}

    def render(
        self, operator: str, templates: Path, variant: Variant, config: Config, problem: Problem
    ) -> Rendered:
        """Render one kernel source; equal arguments give equal bytes.

        Raises:
            TemplateError: If the template is not valid Jinja or uses an undeclared name.
        """
        path = templates / variant.template
        context = template_context(variant, config, problem)
        try:
            body = self._template(path).render(context)
        except jinja2.UndefinedError as problem_:
            raise TemplateError(
                f"{path}: {problem_.message}\n  declared: {', '.join(sorted(context))}"
            ) from None
        except jinja2.TemplateError as problem_:
            raise TemplateError(f"{path}: {problem_.message}") from None
        name = f"{operator}/{variant.pass_name}_{variant.name}"
        constants = ", ".join(f"{dim}={problem.dim(dim)}" for dim in variant.constants)
        # A safe variant serves all combinations of dtypes: those that differ in nothing that its
        # template uses share a kernel. The others' heads name the problem that they are for.
        every = {field for field, _ in problem.dtypes}
        used = every if variant.safe is None else self._free_names(path)
        dtypes = ", ".join(f"{field}={value}" for field, value in problem.dtypes if field in used)
        head = (
            f"// Rendered by kgen from templates/{operator}/{variant.template}\n"
            f"// config: {config.label}\n"
            f"// problem: {', '.join(part for part in (constants, dtypes) if part)}\n"
        )
        # Statements that render to nothing leave runs of blank lines behind.
        source = head + _BLANK_LINES.sub("\n\n", body).lstrip("\n")
        digest = digest_of_text(source, *self._included(source, path))
        return Rendered(name, f"// digest: {digest}\n{source}", digest)

    def _template(self, path: Path) -> jinja2.Template:
        if path not in self._templates:
            self._templates[path] = _parse(self._environment, path)
        return self._templates[path]

    def _free_names(self, path: Path) -> set[str]:
        if path not in self._names:
            self._names[path] = free_names(path)
        return self._names[path]

    def _included(self, source: str, path: Path) -> tuple[str, ...]:
        """Texts of all kgen headers that a source includes, transitively, in a fixed order."""
        seen: dict[str, str] = {}
        pending = sorted(set(_INCLUDE.findall(source)))
        while pending:
            name = pending.pop(0)
            if name in seen:
                continue
            text, includes = self._header(name, path)
            seen[name] = text
            pending += includes
        return tuple(part for name in sorted(seen) for part in (name, seen[name]))

    def _header(self, name: str, path: Path) -> tuple[str, list[str]]:
        if name not in self._headers:
            file = self._include_dir / name
            if not file.is_file():
                raise TemplateError(
                    f'{path}: includes "{name}", which is not in the device '
                    f"library {self._include_dir}"
                )
            text = file.read_text(encoding="utf-8")
            folder = file.parent.relative_to(self._include_dir)
            includes = [
                found if (self._include_dir / found).is_file() else str(folder / found)
                for found in _INCLUDE.findall(text)
            ]
            self._headers[name] = (text, *includes)
        text, *includes = self._headers[name]
        return text, includes


def template_context(variant: Variant, config: Config, problem: Problem) -> dict[str, str | int]:
    """Names that a template may use, with the text that each renders to."""
    values = variant.values(config)
    context: dict[str, str | int] = {name: spell(value) for name, value in values.items()}
    context |= {dim: problem.dim(dim) for dim in variant.constants}
    context |= {field: spelled(field, choice) for field, choice in problem.dtypes}
    return context


def free_names(path: Path) -> set[str]:
    """Names that a template uses.

    Raises:
        TemplateError: If it is not valid Jinja.
    """
    environment = _environment()
    return jinja2.meta.find_undeclared_variables(_syntax(environment, path))


def check_template(path: Path, variant: Variant, signature: Signature) -> None:
    """Demand that a template uses every declared parameter and nothing undeclared.

    Raises:
        TemplateError: Naming the first name that is amiss.
    """
    params = {p.name for p in variant.params}
    allowed = params | set(variant.constants) | {f.name for f in signature.choices}
    used = free_names(path)
    for name in sorted(used - allowed):
        raise TemplateError(
            f"{path}: uses undeclared name '{name}'\n  {suggest(name, allowed)}\n"
            f"  declare it under params or constants at {variant.where}"
        )
    for name in sorted((params | set(variant.constants)) - used):
        raise TemplateError(
            f"{path}: declared name '{name}' is never used\n"
            f"  remove it at {variant.where}, or use it: configs that differ only "
            "in it would be the same kernel"
        )


def _parse(environment: jinja2.Environment, path: Path) -> jinja2.Template:
    _syntax(environment, path)
    return environment.from_string(path.read_text(encoding="utf-8"))


def _syntax(environment: jinja2.Environment, path: Path) -> jinja2.nodes.Template:
    try:
        return environment.parse(path.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as problem:
        raise TemplateError(f"{path}:{problem.lineno}: {problem.message}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise TemplateError(f"{path}: cannot be read: {problem}") from None
