"""Explain which kernel serves a problem, with its verification and times."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec

import torch

from .arguments import DTYPE_NAMES
from .dispatch import DISPATCHERS, Dispatcher
from .problems import Explanation
from .rows import Gpu


def explain(
    operator: str,
    *,
    device: str | torch.device | None = None,
    gpu: str | Gpu | None = None,
    pass_name: str = "forward",
    **problem: int | str | torch.dtype,
) -> Explanation:
    """Return the kernel that serves a contiguous, aligned call, and the evidence for it.

        print(kgen_ops.explain("rmsnorm", M=8192, N=4096, dtype="bf16"))

    Args:
        operator: Name of an operator of the library.
        device: Default: the current CUDA device, else the CPU.
        gpu: Instead of a device: the name of a GPU that the operator was tuned for, or any `Gpu`.
            It need not be in this machine.
        pass_name: `forward` or `backward`.
        problem: Every dim, and dtypes by name or as torch dtypes.
    Returns:
        An `Explanation`; print it.
    Raises:
        ValueError: If operator, pass or a dim is unknown, or a dim is missing.
        TypeError: If a dtype is missing or not supported.
        DispatchError: If the library has no kernel for the device.
        IntegrityError: If a dispatch table differs from the library's list of files.
    """
    chosen, dims, dtypes = parsed(operator, pass_name, problem)
    if gpu is None:
        return chosen.explain(dims, dtypes, placed(device))
    if device is not None:
        raise ValueError(f"explain: got device={device!r} and gpu={gpu!r}; pass one of them")
    if isinstance(gpu, Gpu):
        return chosen.explain(dims, dtypes, gpu)
    tuned = {known.name: known for known in chosen.tables.gpus()}
    if not isinstance(gpu, str) or gpu not in tuned:
        raise ValueError(
            f"explain: gpu = {reprlib.repr(gpu)} is no name of a GPU that {operator} was tuned "
            f"for\n  {_meant(str(gpu), tuned)}known: {', '.join(tuned) or 'none'}\n"
            "  next: pass one of these names, a Gpu, or device=; "
            f"`kgen tune --op {operator}` on another GPU adds it"
        )
    return chosen.explain(dims, dtypes, tuned[gpu])


def _meant(given: str, known: Iterable[str]) -> str:
    near = get_close_matches(given.lower(), list(known), n=1)
    return f"did you mean '{near[0]}'? " if near else ""


def placed(device: str | torch.device | None) -> torch.device:
    """Return a device with its index; None: the current CUDA device, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as problem:
        why = str(problem).partition("\n")[0]
        raise ValueError(f"explain: device = {reprlib.repr(device)} is no device: {why}\n"
                         "  next: pass device=\"cuda\" or device=\"cpu\"") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"explain: device = {str(device)!r}, but PyTorch sees no CUDA device\n"
                         "  next: pass gpu=, the name of a GPU that the operator was tuned for")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where


def parsed(
    operator: str, pass_name: str, problem: Mapping[str, int | str | torch.dtype]
) -> tuple[Dispatcher, dict[str, int], dict[str, str]]:
    """Find the pass, dims and dtypes that the arguments of `explain` name.

    Raises:
        ValueError: If operator or pass is unknown, or a value is neither an extent nor a dtype.
    """
    library = __name__.rsplit(".", maxsplit=2)[0]
    name = f"{library}.{operator}"
    known = str(operator).isidentifier() and not str(operator).startswith("_")
    package = importlib.import_module(name) if known and find_spec(name) is not None else None
    passes = {key.lower(): value for key, value in vars(package).items()
              if isinstance(value, Dispatcher)} if package is not None else {}
    if not passes:
        operators = dict.fromkeys(dispatcher.tables.operator for dispatcher in DISPATCHERS)
        raise ValueError(f"{library} has no operator '{operator}'\n"
                         f"  {_meant(str(operator), operators)}known: {', '.join(operators)}")
    chosen = passes.get(pass_name)
    if chosen is None:
        raise ValueError(f"{operator} has no pass '{pass_name}'\n"
                         f"  {_meant(str(pass_name), passes)}known: {', '.join(passes)}")
    fields = {field.name for field in chosen.signature.choices}
    least = {dim.name: dim.smallest for dim in chosen.signature.dims}
    dims: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    for key, value in problem.items():
        if key in fields:
            dtypes[key] = DTYPE_NAMES.get(value, str(value)) if isinstance(
                value, torch.dtype) else str(value)
        elif isinstance(value, int) and not isinstance(value, bool) and (
            least.get(key, 0) <= value < 1 << 63
        ):
            dims[key] = value
        else:
            raise ValueError(
                f"{operator}: {key} = {value!r} is neither a dtype nor an extent >= "
                f"{least.get(key, 0)} of 64 bits\n"
                f"  {'' if key in least else _meant(key, [*least, *fields])}"
                f"dims: {', '.join(dim.name for dim in chosen.signature.dims)}; "
                f"dtypes and options: {', '.join(sorted(fields))}"
            )
    return chosen, dims, dtypes
