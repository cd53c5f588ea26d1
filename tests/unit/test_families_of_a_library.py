"""Which variants a library carries as families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue
from kgen.emit.families import family_states
from kgen.emit.state import read_table

LIBRARY = Path(__file__).resolve().parents[2] / "generated" / "kgen_ops"


def families(operator: str, pass_name: str, rows_of: str) -> set[str]:
    """Those of a pass, with the committed rows of one variant alone."""
    table = read_table(LIBRARY / operator / "tables" / "h200.yaml")
    rows = tuple(row for row in table.rows
                 if row.pass_name == pass_name and row.variant == rows_of)
    assert rows
    found = family_states(open_catalogue().entry(operator), [replace(table, rows=rows, rules=())])
    return {family.variant for family in found if family.pass_name == pass_name}


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_variant_beyond_the_published_ones_needs_no_row(pass_name: str) -> None:
    """All rows of wkv4 are by `running_max`, which takes no states: `scan` serves those calls."""
    found = families("wkv4", pass_name, "running_max")
    assert found - {"anchored"} == {"running_max", "scan"}
    assert ("anchored" in found) == (pass_name == "backward")


def test_a_variant_that_only_reproduces_what_was_published_needs_a_row() -> None:
    found = families("linear_attention", "forward", "chunk_scan")
    assert {"chunk_scan", "block_per_head", "warp_specialized"} <= found
    assert not {"low_occupancy", "naive"} & found
