"""Render a variant's template for a config and a problem.

`kgen.runtime.rendering` holds the settings of Jinja, which the generated library needs as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jinja2
import jinja2.meta

from kgen.errors import TemplateError, suggest, why_unreadable
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.digest import digest_of_text
from kgen.model.problem import Problem
from kgen.model.signature import Signature
from kgen.model.source_text import bare_text
from kgen.model.space import Variant
from kgen.runtime.rendering import RENDER_ERRORS, Templates
from kgen.runtime.spelling import cuda_spelling, spell

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# Includes without quotes: system headers in angle brackets, which are allowed, and all others.
_OTHER_INCLUDE = re.compile(r'^\s*#\s*include\s*(?!")(\S[^\n]*)', re.MULTILINE)
_SYSTEM_HEADER = re.compile(r"<[\w./]+>\s*(//.*|/\*.*)?")


class Renderer:
    """Renders templates; keeps parsed templates and header digests for its lifetime."""

    def __init__(self, include_dir: Path) -> None:
        self._include_dir = include_dir
        self._rendering = Templates()
        self._templates: dict[Path, str] = {}
        self._names: dict[Path, set[str]] = {}
        self._headers: dict[str, tuple[str, ...]] = {}
        self._bare_headers: dict[str, str] = {}

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
            body = self._rendering.body(self._template(path), context)
        except jinja2.UndefinedError as problem_:
            raise TemplateError(
                f"{path}: {problem_.message}\n  declared: {', '.join(sorted(context))}"
            ) from None
        except jinja2.TemplateError as problem_:
            raise TemplateError(f"{path}: {problem_.message}") from None
        except RENDER_ERRORS as problem_:
            raise TemplateError(
                f"{path}: cannot be rendered: {type(problem_).__name__}: {problem_}"
            ) from None
        name = f"{operator}/{variant.pass_name}_{variant.name}"
        constants = ", ".join(f"{dim}={problem.dim(dim)}" for dim in variant.constants)
        # A safe variant serves all combinations of dtypes. Combinations that differ only in fields
        # that its template does not use share a kernel, so the head names the used fields alone.
        # The head of any other kernel names every field.
        every = {field for field, _ in problem.dtypes}
        used = every if variant.safe is None else self._free_names(path)
        dtypes = ", ".join(f"{field}={value}" for field, value in problem.dtypes if field in used)
        head = (
            f"// Rendered by kgen from templates/{templates.name}/{variant.template}\n"
            f"// config: {config.label}\n"
            f"// problem: {', '.join(part for part in (constants, dtypes) if part)}\n"
        )
        return self.of_text(name, head + body, path)

    def of_text(self, name: str, source: str, path: Path) -> Rendered:
        """Identify a source that was rendered before, by its text and its headers.

        Args:
            name: For messages.
            source: The text, without the first line that names the digest.
            path: Path of the template, for messages.
        Raises:
            TemplateError: If the source includes a file that is not in the device library.
        """
        included = self._included(source, path)
        digest = digest_of_text(source, *included)
        return Rendered(
            name, f"// digest: {digest}\n{source}", digest, self._bare(source, included[::2])
        )

    def _bare(self, source: str, headers: Sequence[str]) -> str:
        """Digest of a source and its headers, without comments and without the headers' paths."""
        for name in headers:
            if name not in self._bare_headers:
                self._bare_headers[name] = _without_paths(self._headers[name][0])
        return digest_of_text(
            _without_paths(source), *sorted(self._bare_headers[name] for name in headers)
        )

    def _template(self, path: Path) -> str:
        if path not in self._templates:
            _syntax(self._rendering.environment, path)
            self._templates[path] = path.read_text(encoding="utf-8")
        return self._templates[path]

    def _free_names(self, path: Path) -> set[str]:
        if path not in self._names:
            self._names[path] = free_names(path)
        return self._names[path]

    def _included(self, source: str, path: Path) -> tuple[str, ...]:
        """Texts of all kgen headers that a source includes, transitively, in a fixed order."""
        for other in _OTHER_INCLUDE.findall(bare_text(source)):
            if not _SYSTEM_HEADER.fullmatch(other) or ".." in other or "</" in other:
                raise TemplateError(
                    f"{path}: includes {other.strip()}\n"
                    f'  allowed: "kgen/..." of the device library, and <...> by a name'
                )
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
            inside = file.resolve().is_relative_to(self._include_dir.resolve())
            if not inside or not file.is_file():
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
    """Names that a template may use, with the value of each."""
    values = [*variant.values(config).items(), *variant.settings]
    context: dict[str, str | int] = {name: spell(value) for name, value in values}
    context |= {dim: problem.dim(dim) for dim in variant.constants}
    context |= {field: cuda_spelling(field, choice) for field, choice in problem.dtypes}
    return context


def free_names(path: Path) -> set[str]:
    """Names that a template uses.

    Raises:
        TemplateError: If it is not valid Jinja.
    """
    return jinja2.meta.find_undeclared_variables(_syntax(Templates().environment, path))


def check_template(path: Path, variant: Variant, signature: Signature) -> None:
    """Check that a template uses every declared parameter and no undeclared name.

    Raises:
        TemplateError: The text names the first unused or undeclared name.
    """
    params = {p.name for p in variant.params}
    allowed = params | set(variant.constants) | {f.name for f in signature.choices}
    allowed |= {name for name, _ in variant.settings}
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


def _without_paths(text: str) -> str:
    return _INCLUDE.sub("", bare_text(text))


def _syntax(environment: jinja2.Environment, path: Path) -> jinja2.nodes.Template:
    try:
        return environment.parse(path.read_text(encoding="utf-8"))
    except jinja2.TemplateSyntaxError as problem:
        raise TemplateError(f"{path}:{problem.lineno}: {problem.message}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise TemplateError(f"{path}: cannot be read: {why_unreadable(problem)}") from None
