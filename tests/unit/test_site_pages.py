"""The site's pages before Sphinx reads them: links, index entries, pictures, commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kgen_site import layout, reference, results
from kgen_site.staging import Staging, declared_names, with_index_entries

FILES = {
    "README.md": "# A\n[b](docs/b.md#part) [c](docs/decisions/README.md)\n",
    "CONTRIBUTING.md": "# C\n[a](README.md)\n",
    "CHANGELOG.md": "# D\n",
    "docs/b.md": (
        "# B\n[a](../README.md) [here](#part) [far](https://example.org/x.md) [no](none.md)\n"
        "[code](../kgen/x.py) [all](own/) ![p](p.svg)\n```\n[kept](../README.md)\n```\n"
        "[after](../CONTRIBUTING.md#x)\n"
    ),
    "docs/decisions/README.md": "# Decisions\n[one](0001-a.md) [b](../b.md)\n",
    "docs/decisions/0001-a.md": "# 0001 A\n[index](README.md)\n",
    "docs/p.svg": "<svg/>",
    "docs/own/y.yaml": "a: 1\n",
    "docs/own/deep/z.cu.jinja": "z\n",
    "kgen/x.py": "x = 1\n",
}


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    Staging(tmp_path / "root", tmp_path / "out").copy()
    return tmp_path / "out"


def test_links_lead_to_pages_of_the_site(staged: Path) -> None:
    front = (staged / "index.md").read_text()
    assert "[b](b.md#part) [c](decisions/index.md)" in front
    assert (staged / "contributing.md").read_text() == "# C\n[a](index.md)\n"
    text = (staged / "b.md").read_text()
    assert "[a](index.md) [here](#part) [far](https://example.org/x.md) [no](none.md)" in text
    assert "[code](sources/kgen/x.py.md) [all](sources/docs/own.md) ![p](p.svg)" in text
    assert "```\n[kept](../README.md)\n```\n[after](contributing.md#x)" in text
    assert "[index](index.md)" in (staged / "decisions/0001-a.md").read_text()


def test_sources_and_pictures_come_along(staged: Path) -> None:
    assert (staged / "p.svg").read_text() == "<svg/>"
    assert "````python\nx = 1\n````" in (staged / "sources/kgen/x.py.md").read_text()
    folder = (staged / "sources/docs/own.md").read_text()
    assert folder.index("## deep/z.cu.jinja") < folder.index("## y.yaml")
    assert "kgen/x.py" in (staged / "sources/index.md").read_text()


def test_navigation_has_the_decisions(staged: Path) -> None:
    assert "0001-a\n```" in (staged / "decisions/index.md").read_text()
    assert "tutorials/first-tune" in (staged / "index.md").read_text()


def test_every_page_of_the_repository_is_in_the_navigation() -> None:
    root = Path(__file__).parents[2]
    pages = {layout.page_of(file) for file in layout.markdown_files(root)}
    listed = {f"{page}.md" for pages in layout.NAVIGATION.values() for page in pages}
    missing = {page for page in pages if page and not page.startswith("decisions/0")}
    assert missing - listed == {"index.md"}


@pytest.mark.parametrize(("code", "names"), [
    ("float f(int a = 1);\nint f();", ["f"]),
    ("template <class T, int N>\nstruct alignas(sizeof(T) * N) Vec;", ["Vec"]),
    ("template <int A>\nusing G = Group<A>;\nusing H = G<1>;", ["G", "H"]),
    ("enum class E { a, b };", ["E"]),
    ("constexpr kgen::Form kForm =\n    A == B ? C : D;", ["kForm"]),
    ("template <class T>\nvoid load(T* a,\n          int n);", ["load"]),
])
def test_names_of_declarations(code: str, names: list[str]) -> None:
    assert declared_names(code) == names


def test_declarations_are_in_the_index() -> None:
    page = with_index_entries("# A\n\n```cpp\nint f();\nint g();\n```\n\nText.\n")
    assert page == ("# A\n\n```{index} kgen::f, kgen::g\n```\n\n"
                    "```cpp\nint f();\nint g();\n```\n\nText.\n")


RESULTS = "## op on h200\n\n### op forward\n\ntable\n\n## op on b200\n\n### op forward\n\ntable\n"


def test_each_picture_is_under_the_heading_of_its_gpu() -> None:
    text = results.with_pictures(RESULTS, ["op-b200-forward"])
    first, second = text.split("## op on b200")
    assert "![" not in first
    assert "### op forward\n\n![Times of op forward on b200" in second
    assert "(pictures/op-b200-forward.svg)" in second


def test_a_picture_without_a_heading_is_an_error() -> None:
    with pytest.raises(ValueError, match="no heading for op-h200-backward"):
        results.with_pictures(RESULTS, ["op-h200-backward"])


def test_command_page() -> None:
    parser = argparse.ArgumentParser(prog="tool", description="A tool.")
    command = parser.add_subparsers().add_parser(
        "do", description="Do *it*.", epilog="examples:\n  # once\n  tool do x",
    )
    command.add_argument("file", metavar="FILE", nargs="+", help="of `kgen`")
    command.add_argument("-n", "--count", type=int, default=3, help="(default: %(default)s) 100 %%")
    command.add_argument("--form", choices=["a", "b"], help="one")
    command.add_argument("--on", action="store_true", help="two")
    text = reference.command_page(parser)
    assert "## tool do\n" in text
    assert "Do \\*it\\*." in text
    assert ".. option:: FILE ...\n\n   of ``kgen``" in text
    assert ".. option:: -n COUNT, --count COUNT\n\n   (default: 3) 100 %\n" in text
    assert ".. option:: --form {a,b}" in text
    assert ".. option:: --on\n" in text
    assert "```shell\n# once\ntool do x\n```" in text


MADE = {
    "__init__.py": (
        "from ._runtime.patching import Bad, patch\nfrom .op import op, op_backward\n"
        "__all__ = ['Bad', 'op', 'op_backward', 'patch']\n"
    ),
    "_runtime/__init__.py": "__all__ = ['hidden']\n",
    "_runtime/patching.py": "class Bad(ValueError): ...\ndef patch(): ...\n",
    "op/__init__.py": "def op(): ...\ndef op_backward(): ...\n",
    "compat/__init__.py": "from .fla import chunk\n__all__ = ['chunk']\n",
    "compat/fla.py": '"""Of FLA."""\ndef chunk(): ...\n',
    "nn/__init__.py": '"""Modules."""\nclass Norm: ...\n__all__ = ["Norm"]\n',
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in MADE.items():
        path = tmp_path / "made_library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("made_library")
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_library"]:
        del sys.modules[name]


def test_operators_are_apart_from_the_library(library: Any) -> None:
    page = reference.operator_page(library)
    assert ".. autofunction:: made_library.op\n\n.. autofunction:: made_library.op_backward" in page
    assert "patch" not in page
    other = reference.library_page(library)
    assert ".. autofunction:: made_library.patch" in other
    assert ".. autoexception:: made_library.Bad" in other
    assert "## made_library.nn\n\nModules.\n" in other
    assert ".. autoclass:: made_library.nn.Norm" in other
    for name in ("made_library.op", "chunk", "hidden"):
        assert name not in other


def test_published_functions_are_grouped_by_module(library: Any) -> None:
    page = reference.published_page(importlib.import_module("made_library.compat"))
    assert "## fla\n\nOf FLA.\n" in page
    assert ".. autofunction:: made_library.compat.chunk" in page
