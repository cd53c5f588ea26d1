"""The verifier on a GPU, with torch as the kernel; prints what a verification costs."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
import torch
from check_fakes import binding, factors
from torch import Tensor

from kgen.check import Fixture, verify
from kgen.model.problem import parse_problem
from kgen.operators.rmsnorm import OPERATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

CUDA = torch.device("cuda", 0)


def honest(t: Mapping[str, Tensor]) -> None:
    for x, y in zip(t["x"].split(65536), t["y"].split(65536), strict=True):  # type: ignore[no-untyped-call]
        x32 = x.float()
        y.copy_(x32 * (x32.square().mean(-1, keepdim=True) + t["eps"]).rsqrt() * factors(t))


@pytest.mark.parametrize(
    "text",
    [
        "M=1,N=4096,dtype=bf16",
        "M=64,N=4096,dtype=fp16",
        "M=8191,N=5003,dtype=bf16",
        "M=1048576,N=128,dtype=bf16",
        "M=262144,N=4096,dtype=fp32",
    ],
)
def test_honest_kernel_passes_and_a_wrong_element_does_not(text: str) -> None:
    problem = parse_problem(text, OPERATOR.signature)
    elements = problem.dim("M") * problem.dim("N")
    free, _ = torch.cuda.mem_get_info(CUDA)
    if elements * 24 > free:
        pytest.skip(f"{elements} elements need about {elements * 24 / 2**30:.0f} GiB free")
    fixture = Fixture(OPERATOR, "forward", problem, CUDA)
    for level in ("trial", "trial", "certify"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        verdict = verify(fixture, binding(honest), level)
        print(
            f"{text} {level}: {(time.perf_counter() - start) * 1e3:.1f} ms, "
            f"{len(verdict.cases)} sets"
        )
        assert verdict.ok, verdict.reason

    def spoiled(t: Mapping[str, Tensor]) -> None:
        honest(t)
        if t["y"].shape[0] == problem.dim("M"):
            t["y"][-1, -1] = 100.0

    verdict = verify(fixture, binding(spoiled))
    assert f"1 of {elements} elements of y out of bound" in verdict.reason
