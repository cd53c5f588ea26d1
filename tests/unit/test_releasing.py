"""Versions, the changelog and the numbers of formats are those that docs/releasing.md promises."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from kgen import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "releasing.md").read_text("utf-8")
FORMATS = re.findall(r"^\| .+? \| (\d+) \| `([\w.]+):(\w+)` \|", PAGE, re.MULTILINE)
HEADINGS = {"New", "Changed", "Renamed", "Removed", "Fixed", "Prose"}


def sections() -> dict[str, list[str]]:
    """The versions of the changelog -> the headings below each."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif line.startswith("### "):
            list(found.values())[-1].append(line[4:])
    return found


def test_the_changelog_has_the_version() -> None:
    versions = list(sections())
    assert versions[0] == "Unreleased"
    assert __version__ in versions, f"CHANGELOG.md has no section '## {__version__}'"
    assert versions[1] == __version__, "the last release is the version of the checkout"
    released = [tuple(map(int, version.split("."))) for version in versions[1:]]
    assert released == sorted(released, reverse=True)


def test_headings_of_what_is_unreleased() -> None:
    for heading in HEADINGS:
        assert f"*{heading}*" in PAGE
    assert set(sections()["Unreleased"]) <= HEADINGS
    assert len(set(sections()["Unreleased"])) == len(sections()["Unreleased"])


def test_the_library_has_the_version() -> None:
    library = ROOT / "generated"
    project = tomllib.loads((library / "pyproject.toml").read_text("utf-8"))["project"]
    module = (library / "kgen_ops" / "__init__.py").read_text("utf-8")
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(module).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__version__"
    }  # fmt: skip
    assert (project["version"], values["__version__"]) == (__version__, __version__)
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


@pytest.mark.parametrize(("number", "module", "name"), FORMATS)
def test_a_formats_number_is_todays(number: str, module: str, name: str) -> None:
    assert getattr(import_module(module), name) == int(number), "docs/releasing.md"


def test_no_format_is_missing() -> None:
    """Every module-level number named FORMAT or SCHEMA is in the table."""
    named = {(module, name) for _, module, name in FORMATS}
    found = set()
    for path in (ROOT / "kgen").rglob("*.py"):
        for name in re.findall(r"^(FORMAT|SCHEMA) = \d+", path.read_text("utf-8"), re.MULTILINE):
            found.add((".".join(path.relative_to(ROOT).with_suffix("").parts), name))
    assert found == named
