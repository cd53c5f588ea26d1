"""Sources with their headers in place."""

from __future__ import annotations

import re
from pathlib import Path

from kgen.assets import include_dir
from kgen.model.spread_source import in_source, pieces, spread
from kgen.model.whole_source import Origin, origins, whole_source

SOURCE = """#include "kgen/a.cuh"
#include <kgen/primitives/p.cuh>
#include "kgen/b.cuh"
int f(int x) { return g(x) > 1; }
"""
HEADERS = {
    "kgen/a.cuh": "#pragma once\n#include \"kgen/b.cuh\"\nint g(int x) {\n    return h(x);\n}\n",
    "kgen/b.cuh": "#pragma once\nint h(int x) { return x && x < 3; }\n",
}


def _write(folder: Path) -> None:
    for name, text in HEADERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_header_stands_once_before_its_first_use(tmp_path: Path) -> None:
    _write(tmp_path)
    whole = whole_source(SOURCE, tmp_path)
    assert whole.count("int h(int x)") == 1
    assert whole.index("int h(") < whole.index("int g(") < whole.index("int f(")
    assert "#include <kgen/primitives/p.cuh>" in whole
    assert "kgen/b.cuh\"" not in whole


def test_lines_lead_back_to_their_files(tmp_path: Path) -> None:
    _write(tmp_path)
    whole = whole_source(SOURCE, tmp_path)
    texts = {"": SOURCE, **HEADERS}
    found = set()
    for line, origin in zip(whole.split("\n"), origins(whole), strict=True):
        if line and not line.startswith("//@"):
            assert texts[origin.file].split("\n")[origin.line - 1] == line
            found.add(origin)
    assert {Origin("kgen/b.cuh", 2), Origin("kgen/a.cuh", 4), Origin("", 4)} <= found
    assert origins(SOURCE)[3] == Origin("", 4)


def test_places_in_messages_name_the_header(tmp_path: Path) -> None:
    _write(tmp_path)
    whole = whole_source(SOURCE, tmp_path)
    lines = [piece.text.strip() for piece in pieces(whole)]
    assert lines == [text.strip() for text in spread(whole).split("\n")]
    message = f"k.cu:{lines.index('&& x < 3;') + 1}: x; k.cu:{len(lines) - 1}: f"
    assert in_source(message, "k.cu", whole) == "kgen/b.cuh:2: x; k.cu:4: f"


def test_headers_can_stand_in_a_source() -> None:
    for path in sorted(include_dir().rglob("*.cuh")):
        if path.parent.name in ("primitives", "host"):  # stay included
            continue
        text = path.read_text()
        assert "#pragma once" in text, path
        depth = 0
        for line in text.splitlines():
            if re.match(r"\s*#\s*if", line):
                depth += 1
            elif re.match(r"\s*#\s*endif", line):
                depth -= 1
            included = re.match(r"\s*#\s*include\s*[\"<]kgen/", line)
            assert not (included and depth), f"{path}: {line}"
