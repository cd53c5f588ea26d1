"""The text of every generated Python file, from the state and the operator's signature."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from kgen import __version__
from kgen.emit.binding import functions_in
from kgen.emit.families import FamilyState
from kgen.emit.functions import pass_values
from kgen.emit.gradients import gradient_values
from kgen.emit.layout import fold, imported, paragraph, quoted
from kgen.emit.plans import (
    PlanFunction,
    PlannedRow,
    config_label,
    let_lines,
    plan_functions,
    plan_key,
    rule_lines,
)
from kgen.emit.rules import rule_functions
from kgen.emit.state import LEARNT, PREDICTED, GpuState, RowState, SafeState, TableState
from kgen.errors import CatalogueError
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Signature
from kgen.operators.base import Operator
from kgen.runtime.extension import EXTENSIONS
from kgen.runtime.integrity import LEAST_TORCH
from kgen.runtime.rows import FORMAT

# Public names of the library that are no operators; `package.py.jinja` imports them.
_PUBLIC_NAMES = ("CapturedCall", "CheckError", "DispatchError", "Explanation", "IntegrityError",
                 "KgenPerformanceWarning", "Miss", "Patched", "capture", "explain", "misses",
                 "patch", "warmup")
_LIBRARY_NAMES = frozenset({*_PUBLIC_NAMES, "compat", "nn", "selftest", "torch"})
# Locals and imports of the generated functions; an argument must not have one of these names.
_LOCAL_NAMES = frozenset({"call", "dense_like", "device", "error", "facts", "fast_path",
                          "file", "given", "launch", "layout", "made", "namedtuple", "only",
                          "prepared", "present", "run", "stream", "torch", "written"})

# Evidence of rows that no search has measured, by origin; other rows have the default of `Row`.
_EVIDENCE = {LEARNT: "measured while a rule was learnt", PREDICTED: PREDICTED}


def operator_module(operator: Operator, pass_names: Iterable[str]) -> str:
    """The public functions of an operator."""
    _check_names(operator)
    signature = operator.signature
    passes = [pass_values(operator, p) for p in signature.passes if p.name in set(pass_names)]
    both = {"forward", "backward"} <= {p["name"] for p in passes}
    gradient = gradient_values(operator) if both else None
    return _render(
        "operator.py.jinja", operator=operator.name, summary=operator.summary, passes=passes,
        dims=signature.dims, dtypes=signature.dtypes, options=signature.options,
        packing=signature.packing,
        gradient=gradient,
        differentiable=any(p.name == "backward" for p in signature.passes),
        declared=_declared_types(signature, passes, gradient),
        any_layout=any(p["any_layout"] for p in passes),
        imports=sorted({"Dispatcher", "WRONG_KIND", "dispatch_modes", "transforms",
                        *(n for p in passes for n in p["imports"])},
                       key=_isort_key),
        any_named=any(p["results"] for p in passes),
    )


def _declared_types(
    signature: Signature, passes: Sequence[Mapping[str, Any]], gradient: Mapping[str, Any] | None
) -> list[str]:
    """The types of `kgen.runtime.signature` that an operator's module imports."""
    used = {
        "Argument": True, "Dim": True, "DTypeField": True, "PassSignature": True,
        "Dot": gradient is not None and bool(gradient["dots"]),
        "Option": bool(signature.options),
        "Packing": signature.packing is not None,
        "Scalar": any(p["scalars"] for p in passes),
    }
    return sorted((name for name, is_used in used.items() if is_used), key=_isort_key)


def table_module(operator: str, signature: Signature, table: TableState) -> str:
    """The dispatch table of one GPU."""
    values = _rows_values(table.rows, signature, frozenset())
    return _render(
        "table.py.jinja", operator=operator, gpu=table.gpu, safe=False,
        records=sorted({row.record for row in table.rows}),
        any_always=any(plan.fits == "always" for plan in values["plans"]),
        rules=rule_functions(table.rules), **values,
    )


def safe_module(operator: str, signature: Signature, rows: Sequence[SafeState]) -> str:
    """The safe kernels of an operator."""
    return _render("safe.py.jinja", operator=operator, safe=True,
                   **_rows_values(rows, signature, GPU_EXPR_NAMES))


def families_module(
    operator: str, signature: Signature, families: Sequence[FamilyState], headers: str
) -> str:
    """The families of an operator; `headers` is the digest of the device headers."""
    passes = {p.name: p for p in signature.passes}
    functions, helpers = plan_functions(families, passes, frozenset())
    grouped: dict[str, list[dict[str, Any]]] = {}
    for family in families:
        grouped.setdefault(family.pass_name, []).append({
            "name": family.variant, "template": family.template, "constants": family.constants,
            "settings": dict(family.settings), "params": family.params, "first": family.first,
            "is_safe": family.is_safe, "plan": functions[plan_key(family)],
            "lets": let_lines(family.lets),
            "rules": [(name, rule_lines(texts, 12)) for name, texts in (
                ("admits", family.admissions), ("fits", family.conditions),
                ("suits", family.preferences))],
        })
        texts = [*family.admissions, *family.conditions, *family.preferences,
                 *(text for _, text in family.lets)]
        helpers |= {name for text in texts for name in functions_in(text)}
    plans = list(functions.values())
    return _render(
        "families.py.jinja", operator=operator, safe=False, format=FORMAT, headers=headers,
        plans=plans, helpers=sorted(helpers), needs_torch=any(plan.scratch for plan in plans),
        passes=list(grouped.items()),
    )


def tables_module(operator: str, gpus: Sequence[GpuState]) -> str:
    """The index of an operator's tables."""
    return _render("tables.py.jinja", operator=operator, gpus=gpus, format=FORMAT)


def package_module(operators: Mapping[str, Sequence[str]]) -> str:
    """The library's `__init__`; `operators` maps an operator to its public functions."""
    exports = sorted(operators.items())
    public = [*_PUBLIC_NAMES, *(name for _, names in exports for name in names)]
    return _render(
        "package.py.jinja", operators=[name for name, _ in exports], exports=exports,
        all=sorted(public, key=_isort_key), version=__version__,
    )


def selftest_module() -> str:
    """The library's `selftest`, which `python -m` runs."""
    return _render("selftest.py.jinja")


def project_files(
    operators: Mapping[str, Sequence[str]], example: str, only_own: bool
) -> dict[str, str]:
    """pyproject.toml, setup.py and README.md.

    Args:
        operators: An operator -> its GPUs.
        example: Arguments of `explain`.
        only_own: Whether all operators are kgen's; then the whole library has kgen's licence.
    """
    return {
        "pyproject.toml": _render("pyproject.toml.jinja", version=__version__,
                                  only_own=only_own,
                                  least_torch=".".join(map(str, LEAST_TORCH))),
        "setup.py": _render("setup.py.jinja", extensions=EXTENSIONS),
        "README.md": _render("README.md.jinja", version=__version__, example=example,
                             operators=sorted(operators.items())),
    }


@dataclass(frozen=True, slots=True)
class _TableRow:
    """The values of a row for its template."""

    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]
    kernel: str
    label: str
    plan: PlanFunction
    record: str
    median_us: float
    evidence: str
    code: str


def _rows_values(
    rows: Sequence[RowState | SafeState], signature: Signature, facts: frozenset[str]
) -> dict[str, Any]:
    passes = {p.name: p for p in signature.passes}
    functions, helpers = plan_functions(rows, passes, facts)
    grouped: dict[str, list[_TableRow]] = {}
    for row in rows:
        measured = row if isinstance(row, RowState) else None
        grouped.setdefault(row.pass_name, []).append(_TableRow(
            dims=measured.dims if measured else (),
            dtypes=row.dtypes,
            constants=measured.constants if measured else (),
            kernel=row.kernel,
            label=_label(row),
            plan=functions[plan_key(row)],
            record=measured.record if measured else "",
            median_us=measured.median_us if measured else 0.0,
            evidence=_EVIDENCE.get(measured.origin, "") if measured else "",
            code=measured.code if measured else "",
        ))
    return {
        "format": FORMAT,
        "plans": list(functions.values()),
        "helpers": sorted(helpers),
        "needs_torch": any(plan.scratch for plan in functions.values()),
        "passes": list(grouped.items()),
    }


def _label(row: PlannedRow) -> str:
    """The config's label as a literal, over several lines if it is long."""
    label = quoted(config_label(row.variant, row.config))
    if len(label) <= 80:
        return label
    head, _, rest = label[1:-1].partition("(")
    lines = [f'{" " * 12}"{head}("']
    for index, part in enumerate(parts := rest.split(", ")):
        text = part + (", " if index + 1 < len(parts) else "")
        if len(lines) > 1 and len(lines[-1]) + len(text) <= 96:
            lines[-1] = f'{lines[-1][:-1]}{text}"'
        else:
            lines.append(f'{" " * 12}"{text}"')
    body = "\n".join(lines)
    return f"(\n{body}\n        )"


def _check_names(operator: Operator) -> None:
    """Refuse names that the generated code cannot use."""
    if not operator.name.isidentifier() or operator.name.startswith("_") or (
        keyword.iskeyword(operator.name) or operator.name in _LIBRARY_NAMES
    ):
        raise CatalogueError(f"operator '{operator.name}' cannot be a function of the library\n"
                             "  choose a Python name without leading underscore, none of: "
                             f"{', '.join(sorted(_LIBRARY_NAMES))}")
    for passed in operator.signature.passes:
        names = [*(t.name for t in passed.tensors), *(s.name for s in passed.scalars)]
        for name in (*names, *(o.name for o in operator.signature.options)):
            if not name.isidentifier() or keyword.iskeyword(name) or name in _LOCAL_NAMES:
                raise CatalogueError(
                    f"{operator.name} {passed.name}: '{name}' cannot be the name of an argument\n"
                    f"  choose a Python name, none of: {', '.join(sorted(_LOCAL_NAMES))}"
                )


def _isort_key(name: str) -> tuple[int, str]:
    """Sort key of ruff's isort: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name.lower())


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )
    environment.filters["quoted"] = quoted
    environment.filters["paragraph"] = paragraph
    environment.filters["imported"] = lambda names, head: imported(head, names)
    environment.filters["named_tuple"] = lambda result: fold(
        f"{result.name} = namedtuple(", [quoted(result.name), quoted(result.fields)], ")")
    environment.filters["values"] = lambda pairs: tuple(value for _, value in pairs)
    return environment


def _render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(**values)
