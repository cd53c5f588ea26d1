"""The spread source means the same, and its lines lead back to the source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kgen.build.host import find_cxx
from kgen.catalogue import open_catalogue
from kgen.model.spread_source import (
    in_source,
    pieces,
    source_of,
    spread,
    watched,
    with_source,
)

TRICKY = """#pragma unroll
for (int i = 0; i < 3 && a[i] != ';'; ++i) {  // x; y
    if (i < n) y[i] = w ? f(i, j < 2) : 1'000;
#define TWO(a) a; \\
    a
    s = "a;b" /* c;
d */; kgen::f(); t = R"x(a;
b)x";
}
"""


def texts(source: str) -> list[str]:
    return [piece.text.strip() for piece in pieces(source) if piece.text.strip()]


def test_each_condition_has_a_line() -> None:
    found = texts("if (i < n && w) y = w ? f(j < 2) : 1;")
    assert found == ["if (i < n", "&& w)", "y = w ?", "f(", "j < 2)", ":", "1;"]


def test_literals_comments_and_directives_stay_whole() -> None:
    found = texts(TRICKY)
    kept = ("a[i] != ';';", "1'000;", '"a;b" /* c;', "#pragma unroll", "#define TWO(a) a; \\")
    for whole in kept:
        assert [text for text in found if whole in text], whole
    assert "// x; y" in found
    assert 't = R"x(a;' in found


@pytest.mark.parametrize("source", [TRICKY, "", "\n\n", "a", "a;", "f(\n)\n"])
def test_only_line_ends_are_added(source: str) -> None:
    assert spread(source).replace("\n", "") == source.replace("\n", "")


def test_own_functions_are_declared_apart_from_the_librarys() -> None:
    source = 'KGEN_DEVICE int f() { return g("inline"); }  // inline\n__forceinline__ int h();'
    found = watched(source)
    assert found.startswith("__inline int f(")
    assert '"inline"' in found
    assert "// inline" in found
    assert "__inline int h(" in found
    assert len(found.split("\n")) == len(pieces(source))


def test_lines_lead_back_to_the_source() -> None:
    lines = TRICKY.splitlines()
    for piece in pieces(TRICKY):
        for word in piece.text.split():
            assert word in lines[piece.line - 1]


def test_a_condition_belongs_to_its_own_statement() -> None:
    found = {piece.text.strip(): piece.statement for piece in pieces(TRICKY)}
    # A varying loop variable says nothing of whether there is a w.
    assert found["y[i] = w ?"] not in (found["if (i < n)"], found["i < 3"])
    assert found["i < 3"] == found["&& a[i] != ';';"]
    assert found["j < 2)"] == found["y[i] = w ?"]


def test_places_in_messages_lead_back() -> None:
    number = next(n for n, p in enumerate(pieces(TRICKY), 1) if p.text.strip() == "j < 2)")
    message = f"k.cu:{number}:7: error: j\n  at k.cu:{number}, other.cu:3"
    assert in_source(message, "k.cu", TRICKY) == "k.cu:3: error: j\n  at k.cu:3, other.cu:3"
    assert in_source("k.cu:9999", "k.cu", "a;\nb;\n") == "k.cu:3"


def test_an_executable_carries_the_source(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (tmp_path / "main.cpp").write_text("int main() { return 7; }")
    subprocess.run([find_cxx(), "main.cpp", "-o", program], cwd=tmp_path, check=True)
    content = with_source(program.read_bytes(), "source; é")
    assert content == with_source(program.read_bytes(), "source; é")
    program.write_bytes(content)
    assert subprocess.run([program], check=False).returncode == 7
    assert source_of(content) == "source; é"
    assert source_of(b"\x7fELF") == ""


def test_templates_keep_their_tokens() -> None:
    catalogue = open_catalogue()
    for name in catalogue.names:
        for template in sorted(catalogue.entry(name).templates.glob("*.cu.jinja")):
            source = template.read_text(encoding="utf-8")
            assert spread(source).replace("\n", "") == source.replace("\n", ""), template
