"""timex by Fourier transforms, for rows of more than a few hundred values.

`test_host.py` has rows of 67 values, which nearly fill the smallest transform. Here transforms are
larger, with few rows. The tests are about accuracy: the bound is relative to each output's own
terms, but the error of a transform is relative to its whole row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_host import BY_RANK, HOST, run_configs

from kgen.catalogue import open_catalogue
from kgen.check import Sizes
from kgen.model.config import Value
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import is_feasible

ENTRY = open_catalogue().entry("timex")
# Enough shared memory for transforms of 4096 points; the host layer has no limit of its own.
ROOMY = replace(HOST, smem_per_block=2**17)
# Input sets of about one row of each case, with all its steps.
SIZES = Sizes(small=2**15, quick=2**14, pool=2**16, rows=2, beyond=65, fresh=1)
# Problem, points of a transform, points of a thread, whether exchanges move complex numbers, batch
# rows of a block, and whether the backward pass keeps the sum of spectra in a workspace.
CASES = (
    ("B=2,C=2,T=500,dtype=fp32", 512, 8, True, 2, False),
    ("B=3,C=1,T=1000,dtype=fp32", 1024, 16, False, 2, True),
    ("B=2,C=1,T=1000,dtype=bf16,w_dtype=fp32", 1024, 32, False, 1, True),
    ("B=3,C=2,T=700,dtype=fp16", 1024, 16, True, 1, False),
    ("B=3,C=1,T=512,dtype=fp32", 512, 16, True, 2, False),
    ("B=2,C=1,T=4096,dtype=fp32", 4096, 16, True, 2, False),
)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_long_rows_agree_with_the_oracle(
    pass_name: str, case: tuple[str, int, int, bool, int, bool]
) -> None:
    text, points, per_thread, wide, rows, parked = case
    variant, signature = ENTRY.space.variant(pass_name, "fft"), ENTRY.operator.signature
    values: dict[str, Value] = {
        "points": points, "per_thread": per_thread, "wide": wide, "rows": rows, "min_blocks": 1
    }  # fmt: skip
    if pass_name == "backward":
        values["parked"] = parked
    problem, config = parse_problem(text, signature), variant.config(values)
    assert is_feasible(variant, config, signature.pass_named(pass_name), problem, ROOMY)
    [(_, _, outcome)] = run_configs(
        ENTRY, variant, "host", [(problem, config)], (BY_RANK,), sizes=SIZES
    )
    assert outcome.fate is Fate.VERIFIED, outcome.reason
    assert outcome.evidence is not None
    tried = {case.case.split()[0] for case in outcome.evidence.tried}
    assert {"normal", *ENTRY.operator.cases} <= tried
