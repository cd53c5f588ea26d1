"""The order in which dispatch offers families without a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.runtime.gpus import Table
from kgen.runtime.rows import Call, Family, Parameter, Rule, SafeRow, always
from kgen.runtime.selection import candidates
from kgen.runtime.signature import Argument, Dim, DTypeField, PassSignature

SIGNATURE = PassSignature(
    function="op", dims=(Dim("M"),), dtypes=(DTypeField("dtype", ("fp32",)),),
    inputs=(Argument("x", ("M",)),), outputs=(Argument("y", ("M",)),),
)
DEVICE = {"max_threads_per_block": 1024, "smem_per_block": 100_000}


def bind(file: Any, call: Call) -> Any:
    return file.launcher("rows", "p", block=(call.threads, 1, 1), smem=0)


def bind_safe(file: Any, call: Call, facts: Mapping[str, int]) -> Any:
    raise AssertionError("nothing is launched here")


def family(name: str, *, fits: Rule = always, suits: Rule = always, safe: bool = False) -> Family:
    """One parameter, whose first config has 32 threads."""
    return Family(
        name=name, template=f"op/{name}.cu.jinja", constants=(), settings={},
        parameters=(Parameter("threads", (32, 64, 128, 256)),), first=((32,),), named={},
        is_safe=safe, admits=(), fits=(fits,), suits=(suits,), bind=bind,
    )


class Fallbacks:
    """A library without rows."""

    def __init__(self, *families: Family) -> None:
        self._families = {one.name: one for one in families}

    def families(self) -> dict[str, Family]:
        return self._families

    def safe_rows(self) -> tuple[SafeRow, ...]:
        return (SafeRow(("fp32",), "safe", "safe()", bind_safe),)

    def ranking(self, gpu: object) -> None:
        raise AssertionError("a table without a GPU has no model")


def order(*families: Family) -> list[str]:
    table = Table(None, True, (), (), DEVICE)
    call = Call(M=4)
    found = candidates(SIGNATURE, "op", table, Fallbacks(*families), (4,), ("fp32",), call)
    return [choice.config for choice in found]


def many_threads(call: Call) -> bool:
    return bool(call.threads == 256)


def test_the_variant_that_the_search_space_lists_first_serves_though_its_config_must_change() -> (
    None
):
    assert order(family("tensor_cores", fits=many_threads), family("cuda_cores")) == [
        "tensor_cores(threads=256)", "cuda_cores(threads=32)", "safe()"]


def test_rules_of_efficiency_go_before_the_order_of_the_search_space() -> None:
    def never(call: Call) -> bool:
        return False

    assert order(family("tensor_cores", suits=never), family("cuda_cores")) == [
        "cuda_cores(threads=32)", "tensor_cores(threads=32)", "safe()"]


def test_a_later_variant_is_made_legal_for_the_case_that_the_first_is_refused() -> None:
    assert order(family("tensor_cores"), family("cuda_cores", fits=many_threads)) == [
        "tensor_cores(threads=32)", "cuda_cores(threads=256)", "safe()"]
