"""Check that the arguments of a call are tensors and numbers that a kernel can read.

Shapes, strides and dtypes are checked in `arguments.py`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .signature import ABSENT, Argument, PassSignature

# Errors that PyTorch or Python raises for an argument of a wrong kind before kgen checks it.
# `Dispatcher.name_wrong_argument` then finds the argument.
WRONG_KIND = (ArithmeticError, RuntimeError, TypeError, ValueError)


def check_tensors(signature: PassSignature, tensors: Sequence[object]) -> None:
    """Check that all inputs are tensors of strided memory, or None where they may be absent.

    Raises:
        TypeError: If an input is neither.
    """
    optional = {field.name for field in signature.dtypes if ABSENT in field.allowed}
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        if tensor is None and argument.dtype in optional:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{signature.function}: {argument.name} must be a tensor, not "
                f"{type(tensor).__name__}\n"
                f"  next: {_instead(argument, tensor, argument.dtype in optional)}")
        check_strided(signature.function, argument.name, tensor)


def check_strided(function: str, name: str, tensor: Tensor) -> None:
    """Check that a tensor is strided memory of numbers.

    Args:
        function: Name of the called function, for the error.
        name: Name of the argument, for the error.
        tensor: The argument's value.
    Raises:
        TypeError: If it is not.
    """
    if tensor.is_nested:
        raise TypeError(f"{function}: {name} is a nested tensor, which kernels cannot read\n"
                        f"  next: pass {name}.to_padded_tensor(0.0), or packed sequences with "
                        "cu_seqlens, if the operator has it")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{function}: {name} has the layout {tensor.layout}; kernels read strided "
                        f"tensors\n  next: pass {name}.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"{function}: {name} is quantised (dtype {tensor.dtype}), which kernels "
                        f"cannot read\n  next: pass {name}.dequantize()")


def _instead(argument: Argument, given: object, optional: bool) -> str:
    if hasattr(given, "__array__") or isinstance(given, list | tuple):
        return f"pass torch.as_tensor({argument.name}) in a supported dtype"
    return f"pass a tensor of shape {argument}{', or None' if optional else ''}"


def check_memory(signature: PassSignature, tensors: Sequence[Tensor | None]) -> None:
    """Check that the storage of each tensor contains all of its elements.

    The storage of a sharded parameter is freed between its uses (`untyped_storage().resize_(0)`). A
    kernel that reads such a tensor crashes the process.

    Raises:
        ValueError: If a storage is too small.
    """
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        if tensor is not None:
            check_storage(signature.function, argument.name, tensor)


def check_storage(function: str, name: str, tensor: Tensor) -> None:
    """Check the storage of one tensor; see `check_memory`."""
    if not tensor.numel() or tensor.device.type == "meta":
        return
    last = sum((extent - 1) * step
               for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    wanted = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if found < wanted:
        raise ValueError(
            f"{function}: {name} has shape {tuple(tensor.shape)}, but its storage has {found} of "
            f"{wanted} bytes: it was freed or resized\n  next: call inside the module that gathers "
            "its sharded parameters, or pass a tensor with memory of its own"
        )


def check_scalars(signature: PassSignature, scalars: Sequence[object]) -> None:
    """Check that all scalars are numbers above their bounds.

    Raises:
        TypeError: If a scalar is no number.
        ValueError: If a scalar is not above its bound.
    """
    for scalar, value in zip(signature.scalars, scalars, strict=True):
        if not _is_number(value):
            raise TypeError(f"{signature.function}: {scalar.name} must be a number, not "
                            f"{_shown(value)}\n  next: pass a float, such as {scalar.name}="
                            f"{scalar.default:g}, the default")
        if scalar.above is not None and not value > scalar.above:  # type: ignore[operator]
            raise ValueError(f"{signature.function}: {scalar.name} = {_shown(value)} must be "
                             f"greater than {scalar.above:g}\n  next: {scalar.name}="
                             f"{scalar.default:g} is the default")


def _is_number(value: object) -> bool:
    """Whether a launch can convert a value to float32: a number, or a tensor of one element."""
    if isinstance(value, Tensor):  # not converted here, which would synchronise with its GPU
        mapped: bool = torch._C._functorch.is_batchedtensor(value)
        return not mapped and value.numel() == 1 and not value.is_complex() and (
            value.device.type != "meta")
    if isinstance(value, str | bytes | bytearray):  # which `float` would parse
        return False
    try:
        float(value)  # type: ignore[arg-type]  # tests whether it converts
    except (ArithmeticError, TypeError, ValueError, RuntimeError):
        return False
    return True


def _shown(value: object) -> str:
    if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
        return "a tensor that vmap maps"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    if isinstance(value, int | float):
        return reprlib.repr(value)
    return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"


def check_flags(signature: PassSignature, flags: Sequence[object]) -> None:
    """Check the choice of each flag and option.

    Args:
        signature: The declared arguments.
        flags: The choice of each of the signature's `flags`, then of each option.
    Raises:
        TypeError: If the choice of a flag is no truth value, or the choice of an option no text.
        ValueError: If a choice is not allowed.
    """
    for field, wanted in zip(signature.flags, flags, strict=False):
        # The keyword is `return_<tensor>`, or `allow_<dtype>`; both name the field.
        if not isinstance(wanted, bool | int):
            raise TypeError(f"{signature.function}: the keyword for {field} must be True or False, "
                            f"not {_shown(wanted)}")
    for option, choice in zip(signature.options, flags[len(signature.flags):], strict=True):
        if not isinstance(choice, str) or choice not in option.allowed:
            error = ValueError if isinstance(choice, str) else TypeError
            raise error(f"{signature.function}: {option.name} = {reprlib.repr(choice)} is not "
                        f"supported\n  allowed here: {', '.join(option.allowed)}")


def refuse_traces(signature: PassSignature) -> None:
    """Refuse a call during `torch.jit.trace`, which would not record it.

    Raises:
        NotImplementedError: If a trace is being recorded.
    """
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{signature.function}: torch.jit.trace cannot record it\n"
            "  next: use torch.export.export or torch.compile"
        )


def check_kinds(
    error: Exception, signature: PassSignature, tensors: Sequence[object],
    scalars: Sequence[object], flags: Sequence[object],
) -> None:
    """Raise kgen's error if a call raised another one because of an argument of a wrong kind.

    Args:
        error: The error that the call raised.
        signature: The declared arguments.
        tensors: One per input; None for one that is left out.
        scalars: One per scalar.
        flags: The choice of each of the signature's `flags`, then of each option.
    Raises:
        TypeError, ValueError: If an argument is of a wrong kind.
    """
    if str(error).startswith(f"{signature.function}:"):
        return
    try:
        check_tensors(signature, tensors)
        check_scalars(signature, scalars)
        check_flags(signature, flags)
    except (TypeError, ValueError) as found:
        raise found from None
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        kind = type(tensor)
        handles = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
        if isinstance(tensor, Tensor) and handles and isinstance(
                error, NotImplementedError | TypeError):
            raise TypeError(
                f"{signature.function}: {argument.name} is a {kind.__name__}, a class that does "
                f"not serve torch.ops.kgen_ops.{signature.function}\n  next: pass the plain tensor "
                "that it stands for, or give its __torch_dispatch__ a case of this operator"
            ) from error
