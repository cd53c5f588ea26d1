"""Families: render a variant with a config for the problem of a call that no row serves.

`kgen emit` writes the families of an operator (`families.py` beside its tables) and their templates
(`_templates/`). Rendering needs Jinja2, which PyTorch itself requires. Compiling needs NVRTC, or a
C++ compiler for the CPU. Where one is missing, dispatch goes on to its next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path
from typing import NamedTuple

from .errors import FamilyError
from .integrity import checked_bytes
from .rows import Call, Family, Row, Value, always
from .spelling import cuda_spelling, itemsizes, spell

TEMPLATES = "_templates"


def family_call(call: Call, choices: Iterable[tuple[str, str]], facts: Mapping[str, int]) -> Call:
    """Return the call on which a family's functions are evaluated.

    Args:
        call: Dims, strides and alignments of the call.
        choices: The call's (dtype field, dtype) and (option, choice) pairs.
        facts: Hardware facts of the device that runs the call.
    """
    pairs = list(choices)
    numbers: dict[str, int] = {**facts, **call.__dict__, **itemsizes(pairs)}
    made = Call(**numbers)
    made.__dict__.update(pairs)  # as text, which rules compare
    return made


class Instance(NamedTuple):
    """A family with a value for each parameter."""

    family: Family
    values: tuple[Value, ...]

    @property
    def named(self) -> dict[str, Value]:
        """The values by parameter."""
        pairs = zip(self.family.parameters, self.values, strict=True)
        return {parameter.name: value for parameter, value in pairs}

    @property
    def config(self) -> str:
        """The config as it is written in rows, without default values: `variant(a=1, b=2)`."""
        said = ((parameter.name, spell(value))
                for parameter, value in zip(self.family.parameters, self.values, strict=True)
                if parameter.default is None or spell(value) != spell(parameter.default))
        return f"{self.family.name}({', '.join(f'{name}={text}' for name, text in said)})"


def instantiated(
    instance: Instance, kernel: str, dims: Mapping[str, int], choices: Mapping[str, str]
) -> Row:
    """Return an unmeasured row for a family that was compiled for a problem."""
    family = instance.family
    return Row(tuple(dims.values()), tuple(choices.values()), family.constants, kernel,
               instance.config, always, family.bind, "", nan, "family")


def source(
    root: Path, instance: Instance, dims: Mapping[str, int], choices: Mapping[str, str]
) -> tuple[str, bytes]:
    """Render a family for a problem; equal arguments give equal bytes.

    Args:
        root: The library's folder; holds `_templates`.
        instance: The family and its config.
        dims: Every dim of the problem.
        choices: Every dtype field and option of the problem.
    Returns:
        A name for the kernel's file, and the CUDA source.
    Raises:
        FamilyError: If Jinja2 is missing, or the template does not render for the problem.
        IntegrityError: If the template differs from the library's list of files.
    """
    family = instance.family
    path = root / TEMPLATES / family.template
    text = checked_bytes(root, path).decode()
    constants = {name: dims[name] for name in family.constants}
    values: dict[str, str | int] = {**family.settings, **constants}
    values |= {name: spell(value) for name, value in instance.named.items()}
    values |= {field: cuda_spelling(field, choice) for field, choice in choices.items()}
    try:
        from .rendering import RENDER_ERRORS, TemplateError, templates
    except ImportError as missing:
        raise FamilyError("no family can be rendered; pip install jinja2 mends it "
                          f"({missing})") from None
    try:
        body = templates().body(text, values)
    except (TemplateError, *RENDER_ERRORS) as problem:
        raise FamilyError(f"{path} does not render: {type(problem).__name__}: {problem}") from None
    fixed = ", ".join(f"{name}={value}" for name, value in {**constants, **choices}.items())
    made = (f"// Rendered by the library from {TEMPLATES}/{family.template}\n"
            f"// config: {instance.config}\n// problem: {fixed}\n{body}").encode()
    return hashlib.sha256(made).hexdigest()[:12], made
