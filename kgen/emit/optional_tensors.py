"""The optional tensors of a pass, and the keywords that request or allow something."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.errors import CatalogueError
from kgen.model.dtypes import DTYPES
from kgen.model.signature import DTypeField, Pass, Signature, Tensor
from kgen.operators.base import Operator
from kgen.runtime.signature import ABSENT


@dataclass(frozen=True, slots=True)
class OptionalTensors:
    """The tensors of a pass that may be absent.

    Attributes:
        inputs: Names of the optional inputs.
        outputs: Optional output -> the Python condition under which it is present.
        flags: Keyword -> the dtype field that it sets.
        described: Keyword -> its line in the docstring.
    """

    inputs: frozenset[str]
    outputs: dict[str, str]
    flags: dict[str, str]
    described: dict[str, str]
    signature: Signature
    result: str

    @classmethod
    def of(cls, operator: Operator, passed: Pass) -> OptionalTensors:
        """Determine the optional tensors and keywords of a pass.

        Raises:
            CatalogueError: If an argument with a default would come before one without.
        """
        fields = {f.name for f in operator.signature.dtypes if f.optional}
        inputs = [t for t in passed.inputs if t.dtype in fields]
        required = [t for t in passed.inputs if t.dtype not in fields]
        if passed.inputs[: len(required)] != tuple(required):
            raise CatalogueError(
                f"{operator.name} {passed.name}: input '{inputs[0].name}' may be absent, but comes "
                f"before one that may not\n  declare {', '.join(t.name for t in required)} first"
            )
        asked_for = operator.signature.asked_for(passed)
        flags = {f"return_{o.name}": o.dtype for o in asked_for}
        described = {f"return_{o.name}": f"Whether to return {o.name}." for o in asked_for}
        for f in operator.signature.rounding_fields():
            rounding = _rounding(operator, f)
            flags[f"allow_{rounding}"] = f.name
            described[f"allow_{rounding}"] = (
                f"Whether {DTYPES[rounding].rounds} operands of products may be rounded to "
                f"{rounding.upper()}; has no effect on other dtypes."
            )
        outputs: dict[str, str] = {}
        for o in (o for o in passed.outputs if o.dtype in fields):
            same = [t.name for t in inputs if t.dtype == o.dtype]
            outputs[o.name] = f"return_{o.name}" if o in asked_for else f"{same[0]} is not None"
        count = len(passed.outputs)
        result = "Any" if outputs else "Tensor" if count == 1 else (
            f"tuple[{', '.join(['Tensor'] * count)}]"
        )
        return cls(frozenset(t.name for t in inputs), outputs, flags, described,
                   operator.signature, result)

    def dtype_of(self, output: Tensor) -> str:
        """The torch dtype, as text, of an output that a keyword requests."""
        (field,) = (f for f in self.signature.dtypes if f.name == output.dtype)
        (name,) = (a for a in field.allowed if a != ABSENT)
        return f"torch.{DTYPES[name].torch}"


def _rounding(operator: Operator, field: DTypeField) -> str:
    """The only dtype to which a field without tensors lets kernels round operands."""
    found = [a for a in field.allowed if a in DTYPES and DTYPES[a].rounds]
    if len(found) != 1:
        raise CatalogueError(
            f"{operator.name}: no tensor has dtype field '{field.name}', and it does not choose "
            f"one dtype to round products to\n  allowed there: {', '.join(field.allowed)}"
        )
    return found[0]
