"""The builds of a renewal: kernels whose text changed, or whose verified code is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kgen.build import Compiler
from kgen.emit.binding import BoundPlan
from kgen.model.artifact import Artifact, BuildFailure, BuildRequest, Rendered
from kgen.model.config import Config
from kgen.model.space import Variant
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import Code, code_of


@dataclass(frozen=True)
class CurrentRow:
    """A row as rendered from the current sources."""

    rendered: Rendered
    variant: Variant
    config: Config
    plan: BoundPlan


@dataclass
class RenewalBuilds:
    """The kernels of an operator that must be compiled, all at once.

    Attributes:
        today: Texts to compile with the current headers.
        earlier: Texts of the library to compile with the library's headers.
    """

    library: Path
    include_dir: Path
    open_compiler: Callable[[Path], Compiler]
    today: dict[tuple[str, str], Rendered] = field(default_factory=dict)
    earlier: dict[tuple[str, str], Rendered] = field(default_factory=dict)
    _made: dict[tuple[str, str], Artifact | BuildFailure] = field(default_factory=dict)

    def run(self) -> None:
        """Compile all requested texts."""
        for folder, wanted in ((self.include_dir, self.today),
                               (self.library / "_include", self.earlier)):
            left = {key: r for key, r in wanted.items() if key not in self._made}
            if not left:
                continue
            compiler = self.open_compiler(folder)
            try:
                requests = [BuildRequest(rendered, arch) for (_, arch), rendered in left.items()]
                self._made |= zip(left, compiler.build(requests), strict=True)
            finally:
                compiler.close()

    def code(self, digest: str, arch: str) -> Code | BuildFailure:
        """The digest of the machine code of a compiled text."""
        made = self._made[digest, arch]
        return made if isinstance(made, BuildFailure) else code_of(read_file(made.path))

    def image(self, digest: str, arch: str) -> bytes:
        """The cubin of a compiled text."""
        made = self._made[digest, arch]
        assert isinstance(made, Artifact)
        return read_file(made.path)
