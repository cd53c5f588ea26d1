"""The device library's folders: a file includes files of its own folder or of those below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgen.assets import builtin_root

INCLUDE = builtin_root().templates / "include" / "kgen"

# What a folder may include besides itself. Every path of includes ends in `primitives`.
MAY_INCLUDE = {
    "host": set(),
    "primitives": {"host"},
    "rows": {"primitives"},
    "fft": {"primitives"},
    "toeplitz": {"primitives", "fft"},
    "recurrent": {"primitives"},
    "chunked": {"primitives"},
    "linear_attention": {"primitives", "recurrent", "chunked"},
    "wkv": {"primitives", "recurrent", "chunked"},
    "wkv4": {"primitives", "chunked"},
    "wkv7": {"primitives", "recurrent", "chunked", "wkv"},
    "wkv6": {"primitives", "recurrent", "chunked", "wkv", "wkv7"},
}
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def test_every_folder_is_listed() -> None:
    assert {p.name for p in INCLUDE.iterdir()} == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_includes_run_one_way(folder: str) -> None:
    for header in sorted((INCLUDE / folder).iterdir()):
        for name in _INCLUDED.findall(header.read_text(encoding="utf-8")):
            path = Path(name)
            if folder == "host":  # compiled without an include path
                assert (header.parent / path).is_file(), f"{header}: {name}"
                continue
            assert path.parts[0] == "kgen", f"{header}: write the whole path of {name}"
            assert (INCLUDE.parent / path).is_file(), f"{header}: {name} does not exist"
            assert path.parts[1] in MAY_INCLUDE[folder] | {folder}, (
                f"{header}: a file of {folder}/ may not include {name}"
            )


def test_no_circle_of_includes() -> None:
    includes = {
        str(p.relative_to(INCLUDE.parent)): _INCLUDED.findall(p.read_text(encoding="utf-8"))
        for p in INCLUDE.rglob("*.cuh")
    }

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " includes ".join((*above, name))
        for below in includes.get(name, ()):
            visit(below, (*above, name))

    for name in includes:
        visit(name, ())


def test_lines_have_at_most_120_columns() -> None:
    files = [path for path in INCLUDE.rglob("*") if path.is_file()]
    assert len(files) > 100
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_table = path.suffix == ".md" and line.startswith("|")
            assert len(line) <= 120 or is_table, f"{path.name}:{number}: {len(line)} columns"


def test_the_page_lists_every_folder_and_what_it_may_include() -> None:
    """The table of docs/architecture.md, a row per folder or per several."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, after = page.partition("| folder | content | may include |\n|---|---|---|\n")
    listed = {}
    for line in after.partition("\n\n")[0].splitlines():
        folders, _, may = line.strip("| ").split(" | ")
        for folder in re.findall(r"`(\w+)`", folders):
            listed[folder] = set(re.findall(r"`(\w+)`", may))
    assert listed == MAY_INCLUDE
