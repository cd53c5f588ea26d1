"""The signature of a pass: dims, dtype fields, options, tensors and scalars.

The operators of kgen and the generated library declare their arguments with the same types. This
module imports neither torch nor another module.

These types are named tuples because a frozen dataclass takes five times as long to define, and that
would show in the import time of the generated library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ABSENT = "none"  # the dtype of a tensor that a call leaves out
# A dtype that only rounds the operands of products -> the dtype of the tensors that it rounds.
ROUNDS: dict[str, str] = {"tf32": "fp32"}


class Dim(NamedTuple):
    """A named extent.

    Attributes:
        name: Upper-case by custom: `M`.
        doc: The meaning of the dim; empty in the generated library.
        smallest: Smallest legal value.
        like: An earlier dim that this one mostly equals; kgen's short names of problems show this
            dim only if it differs. The generated library leaves it out.
        both: Letter for both dims in short names if they are equal: `D` gives `D64` for
            `K=64,V=64`; empty: the earlier dim's name. Not the name of another dim.
    """

    name: str
    doc: str = ""
    smallest: int = 0
    like: str = ""
    both: str = ""


class DTypeField(NamedTuple):
    """A dtype that a problem chooses.

    Attributes:
        name: `dtype`, or `<tensor>_dtype`.
        allowed: Names of dtypes; or names of earlier fields, which stand for the dtype that the
            earlier field chose; or `none`, which means that the tensors of this field may be
            absent. A dtype that only rounds another one (`tf32`) is for fields without tensors;
            such a field may choose it if it may also choose the dtype that is rounded.
        default: One of these, or None if the problem must choose.
    """

    name: str
    allowed: tuple[str, ...]
    default: str | None = None

    @property
    def itemsize_name(self) -> str:
        """The name of this dtype's bytes per element in expressions: `itemsize`, `w_itemsize`."""
        return self.name.replace("dtype", "itemsize")

    @property
    def optional(self) -> bool:
        """Whether tensors of this dtype may be absent."""
        return ABSENT in self.allowed


class Option(NamedTuple):
    """A convention that a problem chooses and that no tensor shows; a keyword of the function.

    Attributes:
        name: Name in problems and in Python; does not end in `dtype`.
        allowed: Identifiers; a template gets the chosen one unchanged.
        default: One of these.
        doc: One line for the generated docstring; empty in the generated library.
    """

    name: str
    allowed: tuple[str, ...]
    default: str
    doc: str = ""


class Argument(NamedTuple):
    """A tensor argument or result, as the generated library declares it.

    Attributes:
        name: Name in the public function.
        dims: Extents, outermost first; `N + 1` is one more than dim N, and `3` is 3.
        dtype: A dtype field's name, or a fixed dtype.
        free_strides: Dims whose stride the caller chooses; all others are contiguous.
        leading: Whether dims[0] stands for any number of leading dims.
        layout_of: For a result: the argument whose order of dims in memory it takes.
        in_out: For an argument: whether the call writes new values into the same memory.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = "dtype"
    free_strides: tuple[str, ...] = ()
    leading: bool = False
    layout_of: str = ""
    in_out: bool = False

    def __str__(self) -> str:
        inner = ("...", *self.dims[1:]) if self.leading else self.dims
        return f"{self.name} [{', '.join(inner)}]"


def extent_of(text: str, dims: Mapping[str, int]) -> int:
    """Return the extent that an entry of `Argument.dims` stands for."""
    if text.isdigit():
        return int(text)
    return dims[text.removesuffix(" + 1")] + text.endswith(" + 1")


class Packing(NamedTuple):
    """Packed sequences of different lengths: a call may concatenate them in one batch row.

    Attributes:
        offsets: The input [sequences + 1], of a dtype that may be `none`. Element i is the first
            time step of sequence i; the last element is the end of the last sequence.
        sequences: The dim that counts the sequences. Without offsets, each batch row is a sequence.
        batch: The dim of batch rows; its extent is 1 with offsets.
    """

    offsets: str
    sequences: str
    batch: str


class Scalar(NamedTuple):
    """A float32 run-time argument such as eps.

    Attributes:
        name: Name in the public function.
        default: The default value.
        above: The value must be greater than this; None if any value is legal.
        doc: One line for the generated docstring; empty in the generated library.
    """

    name: str
    default: float
    above: float | None = None
    doc: str = ""


class Dot(NamedTuple):
    """An input of the backward pass that autograd computes in fp32 before it calls the pass.

    name[...] = sum over the last dim of gradient[..., d] * output[..., d]

    Attributes:
        name: The input of the backward pass.
        gradient: Another input of the backward pass.
        output: An output of the forward pass, of the same shape.
        beside: Autograd computes the input only if the call returned this output of the forward
            pass.
    """

    name: str
    gradient: str
    output: str
    beside: str


class PassSignature(NamedTuple):
    """The arguments and results of one pass of an operator.

    Attributes:
        function: Name of the public function.
        dims: Every dim.
        dtypes: Every dtype field.
        inputs: Tensor arguments.
        outputs: Tensor results.
        scalars: Float arguments.
        flags: Dtype fields that the caller decides by a keyword because no input shows the choice:
            fields of optional outputs, and fields that allow rounding the operands of products.
        options: Options; each has its own keyword after the flags.
        packing: How sequences are packed, if the operator packs any.
    """

    function: str
    dims: tuple[Dim, ...]
    dtypes: tuple[DTypeField, ...]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    scalars: tuple[Scalar, ...] = ()
    flags: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    packing: Packing | None = None

    @property
    def in_outs(self) -> tuple[int, ...]:
        """Positions of the inputs that a call writes as well."""
        return tuple(i for i, argument in enumerate(self.inputs) if argument.in_out)

    @property
    def choices(self) -> tuple[DTypeField | Option, ...]:
        """Dtype fields, then options: everything that a problem chooses besides extents."""
        return (*self.dtypes, *self.options)
