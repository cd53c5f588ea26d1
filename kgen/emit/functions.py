"""The pieces of a generated public function, which `operator.py.jinja` assembles for each pass.

An input whose dtype field allows `none` is optional, with default None. An output of such a field
is present if the input of the same field is. If no input has the field, a keyword `return_<output>`
requests the output. A dtype field without tensors says how the operands of products may be rounded;
a keyword `allow_<dtype>` sets it. An option is a keyword of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

from kgen.emit.binding import MAX_ALIGNMENT
from kgen.emit.docstrings import function_docstring
from kgen.emit.layout import WIDTH, fold, quoted
from kgen.emit.optional_tensors import OptionalTensors
from kgen.emit.results import Result, absent_arguments, absent_outputs, chosen, results
from kgen.errors import CatalogueError
from kgen.model.dtypes import DTYPES
from kgen.model.signature import Packing, Pass, Tensor
from kgen.operators.base import Operator


def function_name(operator: str, pass_name: str) -> str:
    """The public function of a pass: `rmsnorm`, `rmsnorm_backward`."""
    return operator if pass_name == "forward" else f"{operator}_{pass_name}"


def pass_values(operator: Operator, passed: Pass) -> dict[str, Any]:
    """The values of `operator.py.jinja` for a pass.

    Raises:
        CatalogueError: If the pass's tensors cannot be the arguments of a Python function.
    """
    optional = OptionalTensors.of(operator, passed)
    tensors = [t.name for t in passed.inputs]
    scalars = [s.name for s in passed.scalars]
    options = operator.signature.options
    flags = (*optional.flags, *(option.name for option in options))
    function = function_name(operator.name, passed.name)
    head = [
        *(f"{t}: Tensor" + (" | None = None" if t in optional.inputs else "") for t in tensors),
        *(f"{s.name}: float = {s.default}" for s in passed.scalars),
        *(f"{flag}: bool = False" for flag in optional.flags),
        *(f"{option.name}: str = {quoted(option.default)}" for option in options),
    ]
    bounds = [f"{s.name} > {s.above}" for s in passed.scalars if s.above is not None]
    given = [*(f"{t} is None" for t in tensors if t in optional.inputs), *flags]
    usual = [
        *(f"{name}_ptr" for name in tensors if name not in optional.inputs),
        *bounds,
    ]
    negative = [f"({t} is not None and {t}.is_neg())" if t in optional.inputs else f"{t}.is_neg()"
                for t in tensors]
    names = [*tensors, *scalars, *flags]
    groups = [tensors, scalars, *([list(flags)] if flags else [])]
    plain = {True: "PLAIN_OR_NONE", False: "PLAIN_TENSORS"}
    indirect = [f"type({t}) not in {plain[t in optional.inputs]}" for t in tensors]
    dispatcher = f"torch.ops.kgen_ops.{function}("
    made = results(function, passed, optional)
    several = any(r.name for r in made)
    opening, key, closing = chosen(made, f"_results_{passed.name}", absent_arguments(optional))

    def named(indent: int) -> str:
        return (fold(f"return {opening}", key, f"{closing}(*made)", indent) if several
                else "return made[0]")

    imports = {plain[t in optional.inputs] for t in tensors}
    imports |= {"only"} if several and not all(r.name for r in made) else set()
    imports |= {"present"} if len(optional.outputs) > 1 else set()
    imports |= {"written"} if passed.in_outs else set()
    return {
        "name": passed.name,
        "constant": passed.name.upper(),
        "function": function,
        "imports": imports,
        "flags": tuple(optional.flags.values()),
        "inputs": [{"declaration": _declaration(t)} for t in passed.inputs],
        "outputs": [{"declaration": _declaration(t)} for t in passed.outputs],
        "scalars": passed.scalars,
        "head": fold(f"def {function}(", head, f") -> {optional.result}:"),
        "private_head": fold(
            f"def _{function}(", [*head, "given: Any = None"], f") -> {optional.result}:"
        ),
        "fake_head": fold(f"def _fake_{function}(", head, f") -> {optional.result}:"),
        "doc": function_docstring(operator, passed, optional),
        "through_dispatcher": (
            f"{fold(f'made = {dispatcher}', names, ')', 8)}\n        {named(8)}" if several
            else fold(f"return {dispatcher}", names, ")", 8)
        ),
        "results": [r for r in made if several],
        "optional_outputs": list(optional.outputs),
        "given": fold("(", given, ",)" if len(given) == 1 else ")", 8),
        "bounds": " and ".join(bounds),
        "fast_path": fold("fast_path(", [*tensors, *scalars], ")", 12),
        "add_fast_path": fold(
            f"{passed.name.upper()}.add_fast_path(", ["given", "prepared", *tensors], ")", 8),
        "indirect": _alternatives(["transforms()", *indirect], 8),
        "wants_grad": _bracketed(_alternatives(
            [f"({t} is not None and {t}.requires_grad)" if t in optional.inputs
             else f"{t}.requires_grad" for t in tensors], 8)),
        "recorded": f"{_recorded(passed, function, names)}\n            {named(12)}",
        "dispatched": _call("dispatched", passed, groups, 12),
        "call": _call("call", passed, ["layout", *groups], 8),
        "direct": fold(f"return _{function}(", [*names, "given"], ")", 8),
        "name_wrong_argument": _call("name_wrong_argument", passed, ["error", *groups], 8),
        "pointers": [f"{t}_ptr = 0 if {t} is None else {t}.data_ptr()" if t in optional.inputs
                     else f"{t}_ptr = {t}.data_ptr()" for t in tensors],
        "key": [_key(t, optional) for t in tensors] + ([", ".join(flags)] if flags else []),
        "unprepared": _alternatives([
            "prepared is None",
            f"not ({' and '.join(usual)})" if len(usual) > 1 else f"not {usual[0]}",
            *negative,
        ], 4),
        "allocations": [_prepared_allocation(o, optional) for o in passed.outputs],
        "allocators": fold(
            "launch, stream, device, (", [f"new_{o.name}" for o in passed.outputs],
            ",), _, _ = prepared" if len(passed.outputs) == 1 else "), _, _ = prepared", 4),
        "fake_body": _fake_body(passed, optional, made),
        "run": fold("launch(", [
            "stream(device)", *(f"{t}_ptr" for t in tensors),
            *(f"0 if {o.name} is None else {o.name}.data_ptr()" if o.name in optional.outputs
              else f"{o.name}.data_ptr()" for o in passed.outputs),
            *scalars,
        ], ")", 4),
        "written": fold("written(", [t.name for t in passed.in_outs], ")", 4)
        if passed.in_outs else "",
        "result": _result(passed, optional, made),
        "bare": _bare(passed, optional, made),
        "any_layout": any(o.layout_of for o in passed.outputs),
        "schema": _string(_schema(function, passed, optional)),
    }


def _schema(function: str, passed: Pass, optional: OptionalTensors) -> str:
    arguments = [
        *(f"{_type(t, passed)}? {t.name}=None" if t.name in optional.inputs
          else f"{_type(t, passed)} {t.name}" for t in passed.inputs),
        *(f"float {s.name}={s.default}" for s in passed.scalars),
        *(f"bool {flag}=False" for flag in optional.flags),
        *(f'str {o.name}="{o.default}"' for o in optional.signature.options),
    ]
    count = len(passed.outputs)
    result = "Tensor[]" if optional.outputs else "Tensor" if count == 1 else (
        f"({', '.join(['Tensor'] * count)})"
    )
    return f"{function}({', '.join(arguments)}) -> {result}"


def _type(tensor: Tensor, passed: Pass) -> str:
    """The type of an input in a schema; each input that the call writes has its own alias set."""
    if not tensor.in_out:
        return "Tensor"
    index = passed.in_outs.index(tensor)
    return f"Tensor({ascii_lowercase[index]}!)"


def _key(name: str, optional: OptionalTensors) -> str:
    """The part of the lookup key of a prepared launch that an input contributes."""
    key = [f"{name}.{attribute}" for attribute in ("shape", "stride()", "dtype", "get_device()")]
    alignment = f"{name}_ptr & {MAX_ALIGNMENT - 1}"
    if name not in optional.inputs:
        line = ", ".join([*key, alignment])
        if len(line) + 9 > WIDTH:
            return f"{', '.join(key[:2])},\n        {', '.join([*key[2:], alignment])}"
        return line
    # A meta tensor has the device index of the CPU; only its null pointer differs.
    return fold(f"None if {name} is None else (",
                [*key, f"{alignment} if {name}_ptr else -1"], ")", 8)


def _result(passed: Pass, optional: OptionalTensors, made: Sequence[Result]) -> str:
    """The statement that returns the variables of all outputs, None for an absent one."""
    if len(optional.outputs) > 1:
        chooser = "".join([f"_results_{passed.name}[", ", ".join(absent_outputs(optional)), "]"])
        return fold("return present(", [chooser, *(o.name for o in passed.outputs)], ")", 4)
    if not optional.outputs:
        return f"return {_constructed(made[0])}"
    fewest, all_of_them = map(_constructed, made)
    (output,) = optional.outputs
    line = f"return {fewest} if {output} is None else {all_of_them}"
    if len(line) + 4 <= WIDTH:
        return line
    return f"if {output} is None:\n        return {fewest}\n    return {all_of_them}"


def _constructed(result: Result) -> str:
    return f"{result.name}({', '.join(result.fields)})" if result.name else result.fields[0]


def _bare(
    passed: Pass, optional: OptionalTensors, made: Sequence[Result]
) -> dict[str, Any] | None:
    """A shorter path for calls that request none of several optional outputs.

    Deciding about each output would take more host time than the rest of the launch.
    """
    always = [o for o in passed.outputs if o.name not in optional.outputs]
    if len(optional.outputs) < 2 or not always:
        return None
    absent = [c.replace("is not None", "is None") if c.endswith("is not None") else f"not {c}"
              for c in optional.outputs.values()]
    return {
        "condition": " and ".join(absent),
        "allocations": [_prepared_allocation(o, optional) for o in always],
        "run": fold("launch(", [
            "stream(device)", *(f"{t.name}_ptr" for t in passed.inputs),
            *(f"{o.name}.data_ptr()" if o.name not in optional.outputs else "0"
              for o in passed.outputs),
            *(s.name for s in passed.scalars),
        ], ")", 8),
        "result": _constructed(made[0]),
    }


def _declaration(tensor: Tensor) -> str:
    parts = [quoted(tensor.name), quoted(tensor.dims)]
    if tensor.dtype != "dtype":
        parts.append(f"dtype={quoted(tensor.dtype)}")
    if tensor.free_strides:
        parts.append(f"free_strides={quoted(tensor.free_strides)}")
    if tensor.flatten_leading:
        parts.append("leading=True")
    if tensor.layout_of:
        parts.append(f"layout_of={quoted(tensor.layout_of)}")
    if tensor.in_out:
        parts.append("in_out=True")
    return fold("Argument(", parts, ")", 12)


def _alternatives(conditions: Sequence[str], indent: int) -> str:
    line = " or ".join(conditions)
    if len(line) + indent + 24 <= 100:
        return line
    margin = f"\n{' ' * (indent + 4)}"
    return f"({margin}{f'{margin}or '.join(conditions)}\n{' ' * indent})"


def _bracketed(text: str) -> str:
    return text if text.startswith("(\n") else f"({text})"


def _tuple(names: Sequence[str] | dict[str, str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _string(text: str) -> str:
    """A string literal as an argument on a separate line, in pieces if it is long."""
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
    """The input with the layout of an output, or an empty text."""
    if output.layout_of:
        return output.layout_of
    for t in passed.inputs:
        same = (t.dims, t.dtype, t.flatten_leading)
        if same == (output.dims, output.dtype, output.flatten_leading):
            return t.name
    return ""


def _prepared_allocation(output: Tensor, optional: OptionalTensors) -> str:
    made = f"new_{output.name}()"
    if output.name in optional.outputs:
        made = f"None if new_{output.name} is None else {made}"
    return f"{output.name} = {made}"


def _assigned(name: str, optional: OptionalTensors, made: Callable[[int], str]) -> str:
    condition = optional.outputs.get(name)
    if condition is None:
        return f"{name} = {made(4)}"
    line = f"{name} = {made(4)} if {condition} else None"
    if len(line) <= 96 and "\n" not in line:
        return line
    return f"{name} = (\n        {made(8)}\n        if {condition} else None\n    )"


def _call(
    method: str, passed: Pass, groups: Sequence[str | list[str]], indent: int
) -> str:
    """A call of a method of the pass's object with names and tuples of names."""
    head, items = f"{passed.name.upper()}.{method}(", [
        g if isinstance(g, str) else _tuple(g) for g in groups
    ]
    if len(head) + sum(len(item) + 2 for item in items) + indent + 8 <= WIDTH:
        return f"{head}{', '.join(items)})"
    inner = indent + 4
    lines = [g if isinstance(g, str) else _tuple(g) if len(_tuple(g)) + inner + 1 <= WIDTH
             else fold("(", g, ")", inner) for g in groups]
    return "\n".join([head, *(f"{' ' * inner}{line}," for line in lines), f"{' ' * indent})"])


def _recorded(passed: Pass, function: str, names: list[str]) -> str:
    """A call that autograd records; it returns a tuple of the outputs that are present."""
    head = f"made = {passed.name.upper()}.recorded(_{function}, "
    line = f"{head}{_tuple(names)})"
    if len(line) + 12 <= WIDTH:
        return line
    return fold(f"{head}(", names, "))", 12)


def _allocation(output: Tensor, passed: Pass, optional: OptionalTensors, indent: int = 4) -> str:
    """An expression that allocates an output, whatever the strides of the inputs."""
    carrier = _carrier(output, passed)
    if output.layout_of:
        return f"dense_like({carrier})"
    if carrier:
        return fold("torch.empty_like(",
                    [carrier, "memory_format=torch.contiguous_format"], ")", indent)
    packing = optional.signature.packing
    shape = [_extent(output, index, passed, packing) for index in range(len(output.dims))]
    if output.dtype in DTYPES:
        dtype = f"torch.{DTYPES[output.dtype].torch}"
    elif f"return_{output.name}" in optional.flags:
        dtype = optional.dtype_of(output)
    else:
        carriers = [t.name for t in passed.inputs if t.dtype == output.dtype]
        if not carriers:
            raise CatalogueError(f"output '{output.name}' has dtype field '{output.dtype}', which "
                                 "no input has: the generated function could not know it")
        dtype = f"{carriers[0]}.dtype"
    first = passed.inputs[0].name
    extents = fold("(", shape, ")", indent + 4) if len(shape) > 1 else _tuple(shape)
    return fold("torch.empty(", [extents, f"dtype={dtype}", f"device={first}.device"], ")", indent)


def _fake_body(
    passed: Pass, optional: OptionalTensors, made: Sequence[Result]
) -> list[str]:
    if len(passed.outputs) == 1 and not optional.outputs:
        return [f"return {_allocation(o, passed, optional)}" for o in passed.outputs]

    def assigned(output: Tensor) -> str:
        return _assigned(output.name, optional, lambda indent: _allocation(
            output, passed, optional, indent
        ))

    lines = [assigned(o) for o in passed.outputs]
    return [*lines, _result(passed, optional, made)]


def _extent(output: Tensor, index: int, passed: Pass, packing: Packing | None) -> str:
    """The expression of an output's extent in terms of the inputs' extents."""
    name = output.dims[index]
    if name.isdigit():
        return name
    if packing is not None and name == packing.sequences:
        batch = _extent(replace(output, dims=(packing.batch,)), 0, passed, None)
        return f"{batch} if {packing.offsets} is None else {packing.offsets}.shape[0] - 1"
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
