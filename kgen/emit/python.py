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
from kgen.emit.binding import MAX_ALIGNMENT
from kgen.emit.layout import fold, paragraph, quoted
from kgen.emit.plans import PlanFunction, config_label, plan_functions, plan_key
from kgen.emit.state import GpuState, RowState, SafeState, TableState
from kgen.errors import CatalogueError
from kgen.model.dtypes import DTYPES
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Pass, Signature, Tensor
from kgen.operators.base import Operator

_LIBRARY_NAMES = frozenset({"explain", "DispatchError", "Explanation", "torch"})
# Locals and imports of the generated functions, which an argument must not hide.
_LOCAL_NAMES = frozenset({"call", "device_index", "empty_like", "facts", "file", "launch", "layout",
                          "prepared", "run", "stream", "torch"})


def operator_module(operator: Operator, pass_names: Iterable[str]) -> str:
    """The public functions of an operator."""
    _check_names(operator)
    signature = operator.signature
    passes = [_pass_values(operator, p) for p in signature.passes if p.name in set(pass_names)]
    return _render(
        "operator.py.jinja", operator=operator.name, summary=operator.summary, passes=passes,
        dims=signature.dims, dtypes=signature.dtypes,
        any_scalar=any(p["scalars"] for p in passes),
    )


def table_module(operator: str, signature: Signature, table: TableState) -> str:
    """The dispatch table of one GPU."""
    values = _rows_values(table.rows, signature, frozenset())
    return _render(
        "table.py.jinja", operator=operator, gpu=table.gpu, safe=False,
        records=sorted({row.record for row in table.rows}),
        any_always=any(plan.fits == "always" for plan in values["plans"]), **values,
    )


def safe_module(operator: str, signature: Signature, rows: Sequence[SafeState]) -> str:
    """The safe kernels of an operator."""
    return _render("safe.py.jinja", operator=operator, safe=True,
                   **_rows_values(rows, signature, GPU_EXPR_NAMES))


def tables_module(operator: str, gpus: Sequence[GpuState]) -> str:
    """The index of an operator's tables."""
    return _render("tables.py.jinja", operator=operator, gpus=gpus)


def package_module(operators: Mapping[str, Sequence[str]]) -> str:
    """The library's `__init__`; `operators` maps an operator to its public functions."""
    exports = sorted(operators.items())
    public = ["DispatchError", "Explanation", "explain"]
    public += [name for _, names in exports for name in names]
    return _render(
        "package.py.jinja", operators=[name for name, _ in exports], exports=exports,
        all=sorted(public, key=_isort_key), version=__version__,
    )


def project_files(operators: Mapping[str, Sequence[str]], example: str) -> dict[str, str]:
    """pyproject.toml, setup.py and README.md; `operators` maps an operator to its GPUs."""
    return {
        "pyproject.toml": _render("pyproject.toml.jinja", version=__version__),
        "setup.py": _render("setup.py.jinja"),
        "README.md": _render("README.md.jinja", version=__version__, example=example,
                             operators=sorted(operators.items())),
    }


def function_name(operator: str, pass_name: str) -> str:
    """The public function of a pass: `rmsnorm`, `rmsnorm_backward`."""
    return operator if pass_name == "forward" else f"{operator}_{pass_name}"


@dataclass(frozen=True, slots=True)
class _TableRow:
    """A row as its template sees it."""

    dims: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]
    kernel: str
    label: str
    plan: PlanFunction
    record: str
    median_us: float


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
        ))
    return {
        "plans": list(functions.values()),
        "helpers": sorted(helpers),
        "needs_torch": any(plan.scratch for plan in functions.values()),
        "passes": list(grouped.items()),
    }


def _label(row: RowState | SafeState) -> str:
    """The label as a literal, over several lines if it is long."""
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
    """Refuse names that the generated code could not use as they are."""
    if not operator.name.isidentifier() or operator.name.startswith("_") or (
        keyword.iskeyword(operator.name) or operator.name in _LIBRARY_NAMES
    ):
        raise CatalogueError(f"operator '{operator.name}' cannot be a function of the library\n"
                             "  choose a Python name without leading underscore, none of: "
                             f"{', '.join(sorted(_LIBRARY_NAMES))}")
    for passed in operator.signature.passes:
        for name in (*(t.name for t in passed.tensors), *(s.name for s in passed.scalars)):
            if not name.isidentifier() or keyword.iskeyword(name) or name in _LOCAL_NAMES:
                raise CatalogueError(
                    f"{operator.name} {passed.name}: '{name}' cannot be the name of an argument\n"
                    f"  choose a Python name, none of: {', '.join(sorted(_LOCAL_NAMES))}"
                )


def _pass_values(operator: Operator, passed: Pass) -> dict[str, Any]:
    tensors = [t.name for t in passed.inputs]
    scalars = [s.name for s in passed.scalars]
    function = function_name(operator.name, passed.name)
    result = "Tensor" if len(passed.outputs) == 1 else (
        f"tuple[{', '.join('Tensor' for _ in passed.outputs)}]"
    )
    typed = [f"{name}: Tensor" for name in tensors]
    defaults = [f"{s.name}: float = {s.default}" for s in passed.scalars]
    names = [*tensors, *scalars]
    pointers = [f"{name}_ptr" for name in tensors]
    first = tensors[0]
    usual = [*pointers, *(f"{s.name} > {s.above}" for s in passed.scalars if s.above is not None)]
    arguments = [*pointers, *(f"{o.name}.data_ptr()" for o in passed.outputs), *scalars]
    schema_args = [*(f"Tensor {name}" for name in tensors),
                   *(f"float {s.name}={s.default}" for s in passed.scalars)]
    schema_result = "Tensor" if len(passed.outputs) == 1 else (
        f"({', '.join('Tensor' for _ in passed.outputs)})"
    )
    plain = [f"type({name}) not in PLAIN_TENSORS" for name in tensors]
    schema = f"{function}({', '.join(schema_args)}) -> {schema_result}"
    return {
        "name": passed.name,
        "constant": passed.name.upper(),
        "function": function,
        "inputs": [{"declaration": _declaration(t)} for t in passed.inputs],
        "outputs": [{"declaration": _declaration(t)} for t in passed.outputs],
        "scalars": passed.scalars,
        "head": fold(f"def {function}(", [*typed, *defaults], f") -> {result}:"),
        "private_head": fold(f"def _{function}(", [*typed, *defaults], f") -> {result}:"),
        "fake_head": fold(f"def _fake_{function}(", [*typed, *defaults], f") -> {result}:"),
        "doc": _docstring(operator, passed),
        "through_dispatcher": fold(f"torch.ops.kgen_ops.{function}(", names, ")", 8),
        "indirect": _alternatives(["dispatch_modes()", "transforms()", *plain], 4),
        "wants_grad": _alternatives([f"{name}.requires_grad" for name in tensors], 4),
        "tensors": _tuple(tensors),
        "scalar_values": _tuple(scalars),
        "call_names": ", ".join(names),
        "first": first,
        "pointers": [f"{name}_ptr = {name}.data_ptr()" for name in tensors],
        "key": [
            f"{name}.shape, {name}.stride(), {name}.dtype, "
            + ("device_index" if name == first else f"{name}.get_device()")
            + f", {name}_ptr & {MAX_ALIGNMENT - 1}"
            for name in tensors
        ],
        "usual": f"({' and '.join(usual)})" if len(usual) > 1 else usual[0],
        "allocations": [_prepared_allocation(o, passed) for o in passed.outputs],
        "allocator": "empty_like" if any(_carrier(o, passed) for o in passed.outputs) else "_",
        "fake_body": _fake_body(passed),
        "run": fold("launch(", ["stream(device_index)", *arguments], ")", 4),
        "results": ", ".join(o.name for o in passed.outputs),
        "schema": _string(schema),
    }


def _declaration(tensor: Tensor) -> str:
    parts = [quoted(tensor.name), quoted(tensor.dims)]
    if tensor.dtype != "dtype":
        parts.append(f"dtype={quoted(tensor.dtype)}")
    if tensor.free_strides:
        parts.append(f"free_strides={quoted(tensor.free_strides)}")
    if tensor.flatten_leading:
        parts.append("leading=True")
    return fold("Argument(", parts, ")", 12)


def _alternatives(conditions: Sequence[str], indent: int) -> str:
    line = " or ".join(conditions)
    if len(line) + indent + 24 <= 100:
        return line
    margin = f"\n{' ' * (indent + 4)}"
    return f"({margin}{f'{margin}or '.join(conditions)}\n{' ' * indent})"


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _string(text: str) -> str:
    """A literal as an argument of its own line, in pieces if it is long."""
    if len(text) <= 90:
        return quoted(text)
    pieces, line = [], ""
    for word in text.split(" "):
        if line and len(line) + len(word) > 86:
            pieces.append(line)
            line = ""
        line += f"{word} "
    pieces.append(line[:-1])
    return "\n    ".join(map(quoted, pieces))


def _carrier(output: Tensor, passed: Pass) -> str:
    """The input that an output looks like, or an empty text."""
    for t in passed.inputs:
        same = (t.dims, t.dtype, t.flatten_leading)
        if same == (output.dims, output.dtype, output.flatten_leading):
            return t.name
    return ""


def _prepared_allocation(output: Tensor, passed: Pass) -> str:
    carrier = _carrier(output, passed)
    return f"{output.name} = empty_like({carrier})" if carrier else _allocation(output, passed)


def _allocation(output: Tensor, passed: Pass) -> str:
    carrier = _carrier(output, passed)
    if carrier:
        return fold(f"{output.name} = torch.empty_like(",
                    [carrier, "memory_format=torch.contiguous_format"], ")", 4)
    shape = [_extent(output, index, passed) for index in range(len(output.dims))]
    if output.dtype in DTYPES:
        dtype = f"torch.{DTYPES[output.dtype].torch}"
    else:
        carriers = [t.name for t in passed.inputs if t.dtype == output.dtype]
        if not carriers:
            raise CatalogueError(f"output '{output.name}' has dtype field '{output.dtype}', which "
                                 "no input has: the generated function could not know it")
        dtype = f"{carriers[0]}.dtype"
    first = passed.inputs[0].name
    return fold(f"{output.name} = torch.empty(",
                [_tuple(shape), f"dtype={dtype}", f"device={first}.device"], ")", 4)


def _fake_body(passed: Pass) -> list[str]:
    lines = [_allocation(output, passed) for output in passed.outputs]
    if len(lines) == 1:
        return [f"return {lines[0].partition(' = ')[2]}"]
    return [*lines, f"return {', '.join(o.name for o in passed.outputs)}"]


def _extent(output: Tensor, index: int, passed: Pass) -> str:
    """Where an extent of an output is found among the inputs."""
    name = output.dims[index]
    flat = output.flatten_leading and index == 0
    for t in passed.inputs:
        if name not in t.dims:
            continue
        axis = t.dims.index(name) - len(t.dims)
        if t.flatten_leading and axis == -len(t.dims):
            inner = len(t.dims) - 1
            leading = f"{t.name}.shape[:-{inner}]" if inner else f"{t.name}.shape"
            return f"*{leading}" if flat else f"{leading}.numel()"
        return f"{t.name}.shape[{axis}]"
    raise CatalogueError(f"output '{output.name}' has dim '{name}', which no input has")


def _docstring(operator: Operator, passed: Pass) -> str:
    summary = operator.summary if passed.name == "forward" else (
        f"The {passed.name} pass: {operator.summary[0].lower()}{operator.summary[1:]}"
    )
    args = []
    for t in passed.inputs:
        args.append((t.name, f"{_shape(t)}; {t.doc or t.dtype}"))
    for s in passed.scalars:
        bounds = f" > {s.above:g}." if s.above is not None and "> " not in s.doc else ""
        args.append((s.name, (s.doc or "A number.") + bounds))
    lines = [summary, ""]
    lines += [f"    {line}".rstrip() for line in operator.doc.splitlines()]
    lines += ["", "    Args:"]
    lines += [f"        {paragraph(f'{name}: {text}', 8, 4)}" for name, text in args]
    lines += ["    Returns:"]
    outputs = [f"{_shape(o)}; {o.doc or o.dtype}" for o in passed.outputs]
    if len(outputs) > 1:
        outputs = [f"{o.name}: {text}" for o, text in zip(passed.outputs, outputs, strict=True)]
    lines += [f"        {paragraph(text, 8, 4)}" for text in outputs]
    lines += [
        "    Raises:",
        "        ValueError: If shapes, strides, devices or scalars are not as said above.",
        "        TypeError: If a dtype is not supported.",
        "        NotImplementedError: If a gradient is wanted; no backward was generated.",
        "        DispatchError: If the library has no kernel for the device.",
    ]
    if any(t.flatten_leading for t in passed.inputs):
        lines += ["", "    " + paragraph(
            "Leading dims are flattened without a copy where they share one stride; otherwise "
            "the tensor is copied first.", 4)]
    lines += ["", f"    Source: {paragraph(operator.source, 4)}"]
    return "\n".join(lines)


def _shape(tensor: Tensor) -> str:
    inner = ("...", *tensor.dims[1:]) if tensor.flatten_leading else tensor.dims
    return f"[{', '.join(inner)}]"


def _isort_key(name: str) -> tuple[int, str]:
    """The order that ruff wants of `__all__`: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )
    environment.filters["quoted"] = quoted
    environment.filters["paragraph"] = paragraph
    environment.filters["values"] = lambda pairs: tuple(value for _, value in pairs)
    return environment


def _render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(**values)
