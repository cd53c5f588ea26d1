"""The docstrings of generated public functions."""

from __future__ import annotations

from kgen.emit.layout import paragraph, quoted
from kgen.emit.optional_tensors import OptionalTensors
from kgen.model.signature import Pass, Tensor
from kgen.operators.base import Operator


def function_docstring(operator: Operator, passed: Pass, optional: OptionalTensors) -> str:
    """The docstring of a generated public function, without its quotes."""
    summary = operator.summary if passed.name == "forward" else (
        f"The {passed.name} pass of `{operator.name}`."
    )
    args = [(t.name, f"{_shape(t)}; {t.doc or t.dtype}") for t in passed.inputs]
    for s in passed.scalars:
        bounds = f" > {s.above:g}." if s.above is not None and "> " not in s.doc else ""
        args.append((s.name, (s.doc or "A number.") + bounds))
    args += optional.described.items()
    for o in operator.signature.options:
        args.append((o.name, f"{' or '.join(map(quoted, o.allowed))}. {o.doc}".rstrip()))
    lines = [summary, ""]
    lines += [f"    {line}".rstrip() for line in operator.doc.splitlines()]
    lines += ["", "    Args:"]
    lines += [f"        {paragraph(f'{name}: {text}', 8, 4)}" for name, text in args]
    lines += ["    Returns:"]
    outputs = [f"{_shape(o)}; {o.doc or o.dtype}" for o in passed.outputs]
    if len(outputs) > 1:
        outputs = [f"{o.name}: {text}{_when(o.name, optional)}"
                   for o, text in zip(passed.outputs, outputs, strict=True)]
        several = "Several outputs" if optional.outputs else "The outputs"
        outputs.append(f"{several} are returned as a named tuple with these names.")
    lines += [f"        {paragraph(text, 8, 4)}" for text in outputs]
    lines += [
        "    Raises:",
        "        ValueError: If shapes, strides, devices or scalars are not as described above.",
        "        TypeError: If a dtype is not supported.",
        "        NotImplementedError: If a gradient is needed"
        + (" and the library has no backward pass." if passed.name == "forward" else
           " of an output of this function."),
        "        DispatchError: If the library has no kernel for the device.",
    ]
    if any(t.flatten_leading for t in passed.inputs):
        lines += ["", "    " + paragraph(
            "Leading dims are flattened without a copy where they share one stride; otherwise "
            "the tensor is copied first.", 4)]
    lines += ["", f"    Source: {paragraph(operator.source, 4)}"]
    return "\n".join(lines)


def _when(output: str, optional: OptionalTensors) -> str:
    condition = optional.outputs.get(output, "").removesuffix(" is not None")
    return f" Only with {condition}." if condition else ""


def _shape(tensor: Tensor) -> str:
    inner = ("...", *tensor.dims[1:]) if tensor.flatten_leading else tensor.dims
    return f"[{', '.join(inner)}]"
