"""`kgen package`: write a library as a wheel, with cubins for the requested architectures."""

from kgen.package.job import ArchCubins, Packaged, package

__all__ = ["ArchCubins", "Packaged", "package"]
