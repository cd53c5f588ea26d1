"""The layers of the architecture: a module imports only lower layers, and never a sibling."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kgen

ROOT = Path(kgen.__file__).parent

# Top to bottom; packages in one row are siblings. See docs/architecture.md.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"learn", "measure_check", "coverage", "predict"},
    {"tune", "bench", "verify", "package", "doctor", "scaffold"},
    {"emit", "report"},
    {"trial"},
    {"journal"},
    {"worker"},
    {"search", "build", "launch", "check", "measure"},
    {"catalogue"},
    {"operators"},
    {"model"},
    {"errors", "assets", "runtime", "compat", "nn"},
]
RANK = {name: i for i, row in enumerate(LAYERS) for name in row}
# `assets` raises kgen's errors; both are leaves.
ALLOWED_SIBLINGS = {("assets", "errors")}
# Imports inside functions are for these alone: what a light command must not load, and sysconfig,
# which no first call needs.
HEAVY = {
    "torch", "optuna", "jinja2", "numpy", "triton", "liger_kernel", "fla", "fast_transformers",
    "sqlalchemy", "sysconfig",
}  # fmt: skip
# Modules of kgen that import a heavy package at their top. Only functions import them, so that a
# light command does not load the package.
LATE = {
    "kgen.cli.completers",
    "kgen.cli.parser",
    "kgen.worker.facts",
    "kgen.worker.peers",
    "kgen.worker.runner",
    "kgen.search.patient",
    "kgen.search.sampler",
    "kgen.launch.cuda",
    "kgen.launch.host",
}


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "_data" not in p.parts)


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        if node.module == "kgen":
            return [f"kgen.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def test_every_package_has_a_place() -> None:
    known = set(RANK) | {"__init__"}
    assert {part_of(p) for p in modules()} <= known


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    if path == ROOT / "__init__.py":
        return
    own = part_of(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for name in imported(node):
            parts = name.split(".")
            if parts[0] != "kgen" or len(parts) < 2 or parts[1] == "__version__":
                continue
            other = parts[1]
            if other == own or (own, other) in ALLOWED_SIBLINGS:
                continue
            assert RANK[other] > RANK[own], f"{own} may not import {name} (line {node.lineno})"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_function_level_imports_are_of_heavy_packages(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            for name in imported(node):
                top = name.split(".")[0]
                assert top in HEAVY or name in LATE, f"line {node.lineno}: {name}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", ["runtime", "compat"])
def test_what_is_copied_is_self_contained(package: str) -> None:
    """These are copied verbatim into the generated library."""
    paths = sorted((ROOT / package).glob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not any(n.split(".")[0] == "kgen" for n in imported(node)), path
