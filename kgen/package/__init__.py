"""A library as a wheel: cubins for the architectures that were asked for, the same bytes always."""

from kgen.package.cubins import KernelSource, check_arch, compile_cubins
from kgen.package.wheel import Project, read_project, wheel_bytes, wheel_name

__all__ = [
    "KernelSource", "Project", "check_arch", "compile_cubins", "read_project", "wheel_bytes",
    "wheel_name",
]
