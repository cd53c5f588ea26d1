"""A rename of variants, parameters or headers leaves the machine code of every row unchanged.

`codes_before_rename.txt` holds the code digests of the rows of a library from before kgen's words
were replaced by the field's terms. After a tune, which rightly changes rows, write the file again
with

    python tests/references/library_codes.py generated/kgen_ops > FILE
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from library_codes import codes_of_operator

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue
from kgen.emit.renewal import renewed
from kgen.emit.state import read_safe, read_tables
from kgen.runtime import nvrtc

LIBRARY = Path(__file__).resolve().parents[2] / "generated" / "kgen_ops"
BEFORE = Path(__file__).with_name("codes_before_rename.txt").read_text("utf-8").splitlines()

pytestmark = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
each_operator = pytest.mark.parametrize("operator", open_catalogue().names)


# Later operators were never renamed. In no tier: the other test compares every row's code, too.
@pytest.mark.slow
@pytest.mark.parametrize("operator", sorted({line.split()[0] for line in BEFORE}))
def test_codes_are_those_of_before(operator: str) -> None:
    now = codes_of_operator(LIBRARY, operator)
    before = [line for line in BEFORE if line.startswith(f"{operator} ")]
    assert now == before


@each_operator
def test_every_row_holds_the_code_that_it_compiles_to(operator: str, tmp_path: Path) -> None:
    """A comment in every header makes each text another: so each is rendered and compiled anew."""
    headers = tmp_path / "include"
    shutil.copytree(include_dir(), headers)
    for header in headers.rglob("*.cuh"):
        header.write_text(f"// A comment.\n{header.read_text(encoding='utf-8')}", encoding="utf-8")
    folder = LIBRARY / operator
    tables = read_tables(folder / "tables").values()
    assert all(row.code for table in tables for row in table.rows), "run kgen emit"
    entry = open_catalogue().entry(operator)
    found = renewed(LIBRARY, entry, headers, lambda folder: open_compiler("nvrtc", [folder]))
    assert not found.stale, "\n".join(map(str, found.stale))
    rows = sum(len(table.rows) for table in tables) + len(read_safe(folder / "safe.yaml"))
    assert found.kept == rows
