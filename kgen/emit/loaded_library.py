"""An emitted library, imported into this process to ask which kernel serves a problem."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.emit.published import PACKAGE, no_library
from kgen.errors import CatalogueError, ProblemError, suggest
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.signature import Signature


@dataclass(frozen=True, slots=True)
class Served:
    """The kernel that serves a problem.

    Attributes:
        step: The dispatch step: `exact`, `learnt`, `nearest`, `family` or `safe`.
        config: The kernel's config; values are texts, in the library's spelling.
        kernel: Stem of its file in the library; empty for a family, which is rendered for the call.
    """

    step: str
    config: Config
    kernel: str = ""


def require_operator(folder: Path, operator: str) -> None:
    """Check that the library of a folder has an operator; imports nothing.

    Raises:
        CatalogueError: If there is no library in the folder.
        ProblemError: If it does not have the operator.
    """
    if not (folder / PACKAGE / "__init__.py").is_file():
        raise no_library(folder, "--out")
    known = sorted(path.parent.name for path in (folder / PACKAGE).glob("*/tables"))
    if operator not in known:
        raise ProblemError(f"{PACKAGE} in {folder} has no operator '{operator}'\n"
                           f"  {suggest(operator, known)}\n"
                           "  next: kgen tune or kgen emit --add adds an operator of 'kgen ops'")


class LoadedLibrary:
    """An imported library that answers queries; made by `open`. A process can load only one.

    Attributes:
        package: The module `kgen_ops`.
    """

    def __init__(self, folder: Path, package: Any) -> None:
        self.package = package
        self._folder = folder

    @classmethod
    @contextmanager
    def open(cls, folder: Path, option: str) -> Iterator[LoadedLibrary]:
        """Import the library of a folder, and turn errors of the library into kgen's.

        Args:
            folder: The folder that contains `kgen_ops`.
            option: The option that names the folder, for messages.
        Raises:
            CatalogueError: If there is no library, it does not load, one of its files was changed,
                or this process has loaded another library.
        """
        if not (folder / PACKAGE / "__init__.py").is_file():
            raise no_library(folder, option)
        sys.path.insert(0, str(folder.resolve()))
        try:
            package = importlib.import_module(PACKAGE)
            if Path(package.__path__[0]).resolve() != (folder / PACKAGE).resolve():
                raise CatalogueError(
                    f"this process has loaded {package.__path__[0]}, and cannot load "
                    f"{folder / PACKAGE} beside it\n  next: use another process")
            yield cls(folder, package)
        except (ImportError, RuntimeError) as error:  # the library raises RuntimeErrors
            raise CatalogueError(f"{folder / PACKAGE}: {error}") from None
        finally:
            sys.path.remove(str(folder.resolve()))

    def require(self, operator: str) -> None:
        """Check that the library has an operator.

        Raises:
            ProblemError: If it does not.
        """
        require_operator(self._folder, operator)

    def tuned(self, operator: str) -> tuple[Any, ...]:
        """The GPUs for which an operator was tuned."""
        found: tuple[Any, ...] = importlib.import_module(f"{PACKAGE}.{operator}.tables").GPUS
        return found

    def gpu(self, operator: str, profile: GpuProfile) -> Any:
        """A GPU as an argument of the library's `explain`; a tuned one is given by its name."""
        if profile.name in {known.name for known in self.tuned(operator)}:
            return profile.name
        rows = importlib.import_module(f"{PACKAGE}._runtime.rows")
        return rows.Gpu(profile.name, profile.title, profile.device_names, profile.arch,
                        profile.names)

    def served(
        self, operator: str, pass_name: str, problem: Problem, gpu: GpuProfile
    ) -> Served | None:
        """Ask which kernel serves a contiguous, aligned call; None if the library has none.

        Args:
            operator: Name of the operator.
            pass_name: `forward` or `backward`.
            problem: The problem.
            gpu: The GPU; it need not be in this machine.
        Raises:
            ProblemError: If the library does not have the operator or the problem's fields.
        """
        self.require(operator)
        try:
            found = self.package.explain(
                operator, gpu=self.gpu(operator, gpu), pass_name=pass_name, **dict(problem.dims),
                **dict(problem.dtypes))
        except self.package.DispatchError:
            return None
        except (TypeError, ValueError) as error:
            raise ProblemError(str(error)) from None
        return Served(found.step, _parsed(found.config), found.kernel)

    def row_problems(
        self, operator: str, pass_name: str, profile: GpuProfile, signature: Signature
    ) -> list[Problem]:
        """The problems of a GPU's rows, in their order; empty if there are none."""
        passed = self.passed(operator, pass_name)
        known = [gpu for gpu in self.tuned(operator) if gpu.name == profile.name]
        return [
            Problem(
                tuple(zip((dim.name for dim in signature.dims), row.dims, strict=True)),
                tuple(zip((field.name for field in signature.choices), row.dtypes, strict=True)),
            )
            for gpu in known for row in passed.tables.rows(gpu)
        ]

    def source(self, operator: str, pass_name: str, problem: Problem, served: Served) -> str:
        """The CUDA source that serves a problem: a file of the library, or rendered as in a call.

        Returns:
            The text, without the line that names its digest.
        """
        if served.kernel:
            file = self._folder / PACKAGE / operator / "kernels" / f"{served.kernel}.cu"
            text = file.read_text(encoding="utf-8")
        else:
            _, text = self.rendered(operator, pass_name, problem, served.config)
        first, _, rest = text.partition("\n")
        return rest if first.startswith("// digest: ") else text

    @property
    def folder(self) -> Path:
        """Folder of the package `kgen_ops`."""
        return self._folder.resolve() / PACKAGE

    @property
    def headers(self) -> Path:
        """Folder of the library's device headers."""
        return self._folder.resolve() / PACKAGE / "_include"

    def rendered(
        self, operator: str, pass_name: str, problem: Problem, config: Config
    ) -> tuple[str, str]:
        """Render a family as the library does at a first call.

        Args:
            operator: Name of the operator.
            pass_name: `forward` or `backward`.
            problem: The problem.
            config: The config that `served` returned with step `family`.
        Returns:
            The stem of the kernel's file, and its source.
        """
        families = importlib.import_module(f"{PACKAGE}._runtime.families")
        adaptation = importlib.import_module(f"{PACKAGE}._runtime.adaptation")
        family = self.passed(operator, pass_name).tables.families()[config.variant]
        instance = families.Instance(family, adaptation.named_values(family, config.label))
        stem, text = families.source(
            self._folder.resolve() / PACKAGE, instance, dict(problem.dims), dict(problem.dtypes))
        return stem, text.decode()

    def passed(self, operator: str, pass_name: str) -> Any:
        """Return the dispatcher of a pass.

        Raises:
            ProblemError: If the library does not have the operator.
        """
        self.require(operator)
        return getattr(importlib.import_module(f"{PACKAGE}.{operator}"), pass_name.upper())


def _parsed(label: str) -> Config:
    """Read `variant(a=1, b=2)`."""
    variant, _, inner = label.removesuffix(")").partition("(")
    values = dict(part.split("=", 1) for part in inner.split(", ") if part)
    return Config.of(variant, values)
