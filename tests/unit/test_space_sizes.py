"""Search-space files stay readable: narrow lines, and no file longer than its operator needs."""

from __future__ import annotations

from pathlib import Path

import pytest

SPACES = Path(__file__).resolve().parents[2] / "search_spaces"
COLUMNS = 110


@pytest.mark.parametrize(
    "file", sorted(SPACES.rglob("*.yaml")), ids=lambda f: str(f.relative_to(SPACES))
)
def test_lines_are_narrow(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert not [f"{i}: {line}" for i, line in enumerate(lines, 1) if len(line) > COLUMNS]


@pytest.mark.parametrize(
    ("files", "most"),
    [
        (("linear_attention.yaml",), 750),
        (("wkv5.yaml", "wkv6.yaml", "families/wkv.yaml"), 810),
        (("wkv7.yaml",), 600),
        (("wkv4.yaml",), 300),
    ],
    ids=["linear_attention", "wkv", "wkv7", "wkv4"],
)
def test_files_are_short(files: tuple[str, ...], most: int) -> None:
    lines = sum(len((SPACES / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= most
