"""The errors of a kernel after which dispatch tries the next kernel."""

from __future__ import annotations

from .errors import CheckError, FamilyError

# Results of the driver that say that a kernel does not fit the device. None of them harms the
# context: invalid value (shared memory beyond the limit), invalid image, no binary for the GPU,
# invalid PTX, unsupported PTX version, JIT compiler missing, out of resources, cooperative launch
# too large, not supported.
_DOES_NOT_FIT = frozenset({1, 200, 209, 218, 221, 222, 701, 720, 801})


def is_refusal(trouble: RuntimeError) -> bool:
    """Whether a kernel cannot run here, although others may."""
    if isinstance(trouble, FamilyError | CheckError):
        return True
    # Nothing is imported before a kernel fails: a working call needs neither.
    from .cuda import CudaError
    from .nvrtc import CompileError, NvrtcError

    if isinstance(trouble, CudaError):
        return trouble.code in _DOES_NOT_FIT
    return isinstance(trouble, CompileError | NvrtcError)
