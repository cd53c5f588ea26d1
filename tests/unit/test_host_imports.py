"""A host build whose kernel calls functions of the system is refused, however it names them."""

from __future__ import annotations

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.runtime.cache import read_file
from kgen.trial.host_imports import system_calls
from kgen.trial.kept_state import kept_state

_KERNEL = """#include "kgen/primitives/math.cuh"

extern "C" __global__ void f(float* y, float x) {{ y[0] = {value}; }}
KGEN_EXPORT(f);
"""


@pytest.mark.parametrize(
    ("value", "names"),
    [("kgen::exp(x)", ()), ("static_cast<float>(rand()) * x", ("rand",))],
)
def test_functions_of_the_system(value: str, names: tuple[str, ...]) -> None:
    compiler = open_compiler("host", [include_dir()], jobs=1)
    rendered = Rendered("f", "#include <cstdlib>\n" + _KERNEL.format(value=value), value)
    built = compiler.build([BuildRequest(rendered, "host")])[0]
    compiler.close()
    assert isinstance(built, Artifact), built
    assert system_calls(read_file(built.path)) == names
    variant = open_catalogue().entry("rmsnorm").space.variant("forward", "naive")
    reason = kept_state(rendered, built, variant)
    assert reason.startswith("the kernel calls functions of the system: rand" if names else "")
    assert bool(reason) == bool(names)


def test_what_is_no_module() -> None:
    assert system_calls(b"") == system_calls(b"\x7fELF\x02\x01 cut off") == ()
