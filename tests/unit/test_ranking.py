"""Configs ranked by a model: its value, what it sees, how dispatch and `explain` use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kgen.emit.rankings import ranking_module, write_rankings
from kgen.model.problem import Problem
from kgen.predict.rankings import Sample, ranking_from
from kgen.predict.trees import Growth
from kgen.runtime import pass_tables
from kgen.runtime.adaptation import with_values
from kgen.runtime.gpus import Table
from kgen.runtime.pass_tables import PassTables
from kgen.runtime.ranking import Ranking, Tree, Winner, features_of
from kgen.runtime.rows import Call, Family, Gpu, Parameter, Row, SafeRow, always
from kgen.runtime.selection import RowChoice, candidates, explanation
from kgen.runtime.signature import Argument, Dim, DTypeField, PassSignature

SIGNATURE = PassSignature(
    function="op", dims=(Dim("M"), Dim("N")), dtypes=(DTypeField("dtype", ("fp32", "bf16")),),
    inputs=(Argument("x", ("M", "N")),), outputs=(Argument("y", ("M", "N")),),
)
FACTS = {"sm_count": 4, "max_blocks_per_sm": 32, "max_threads_per_sm": 2048, "warp_size": 32,
         "smem_per_sm": 200_000, "smem_per_block": 100_000, "max_threads_per_block": 1024,
         "compute_capability": 90}
GPU = Gpu("h200", "NVIDIA H200", ("NVIDIA H200",), "sm_90a", FACTS)
# Two comparisons: the leaf's number has bit 0 for `threads` and bit 1 for `wide=yes`.
RANKING = Ranking(7, 0.25, (Tree(("threads", "wide=yes"), (96.0, 0.5), (0.0, 1.0, 2.0, 4.0)),
                            Tree(("launch.waves",), (3.0,), (0.0, 8.0))))
FEWER_THREADS = Ranking(7, 0.0, (Tree(("threads",), (96.0,), (0.0, 1.0)),))


def bind(file: Any, call: Call) -> Any:
    """A small launch, and one with a CTA of `threads` for each row; M = 0 launches nothing."""
    small = file.launcher("prepare", "p", block=(32, 1, 1), smem=0)
    main = file.launcher("work", "pp", block=(call.threads, 1, 1), smem=call.bytes)
    new = file.scratch(5 * call.M, None)

    def run(stream: int, x: int, y: int) -> None:
        small(stream, min(call.M, 1), 1, 1, new().data_ptr())
        main(stream, call.M, 1, 1, x, y)

    return run


FAMILY = Family(
    name="rows", template="op/rows.cu.jinja", constants=(), settings={},
    parameters=(Parameter("threads", (32, 64, 128, 256)), Parameter("wide", ("no", "yes"), "no")),
    first=((64, "no"),), named={"bytes": lambda call: 2 * call.threads,
                                "share": lambda call: call.N // (call.threads - 32)},
    is_safe=False, admits=(), fits=(), suits=(), bind=bind,
)


class Fallbacks:
    """A library with one family and perhaps a model."""

    def __init__(self, model: Ranking | None) -> None:
        self.model = model

    def families(self) -> dict[str, Family]:
        return {"rows": FAMILY}

    def safe_rows(self) -> tuple[SafeRow, ...]:
        return (SafeRow(("bf16",), "safe", "safe()", bind_safe),)

    def ranking(self, gpu: Gpu) -> Ranking | None:
        assert gpu is GPU
        return self.model


def bind_safe(file: Any, call: Call, facts: Mapping[str, int]) -> Any:
    raise AssertionError("nothing is launched here")


def row(m: int, config: str) -> Row:
    """A row that another N was compiled into."""
    return Row((m, 128), ("bf16",), ("N",), "k", config, always, bind, f"of_{m}", 1.0)


NEAR, FAR = row(8, "rows(threads=128)"), row(64, "rows(threads=32)")


def chosen(model: Ranking | None, table: Table, m: int = 8) -> list[RowChoice]:
    call = Call(M=m, N=64)
    return list(candidates(SIGNATURE, "op", table, Fallbacks(model), (m, 64), ("bf16",), call))


def table(**fields: Any) -> Table:
    return Table(GPU, True, (NEAR, FAR), (), FACTS)._replace(**fields)


@pytest.mark.parametrize(("threads", "wide", "waves", "predicted"), [
    (96, 0, 3.0, 0.25), (97, 0, 0.0, 1.25), (96, 1, 0.0, 2.25), (97, 1, 3.5, 12.25),
])
def test_a_tree_is_read_by_the_bits_of_its_comparisons(
    threads: float, wide: float, waves: float, predicted: float
) -> None:
    features = {"threads": threads, "wide=yes": wide, "launch.waves": waves}
    # What is missing is 0.
    assert RANKING.predicted([features, {}, features]) == [predicted, 0.25, predicted]
    assert RANKING.predicted([]) == []


def test_features_are_of_the_config_the_problem_and_the_larger_launch() -> None:
    call = Call(**FACTS, M=40, N=64)
    full = with_values(call, FAMILY, (128, "yes"))
    found = features_of(FAMILY, (128, "yes"), full, {"M": 40, "N": 64}, {"dtype": "bf16"})
    assert found["variant=rows"] == found["dtype=bf16"] == found["wide=yes"] == 1
    assert (found["M"], found["dims"], found["threads"], found["bytes"]) == (40, 2560, 128, 256)
    assert (found["launches"], found["workspace"]) == (2, 200)
    assert (found["launch.ctas"], found["launch.threads"], found["launch.smem"]) == (40, 128, 256)
    assert found["launch.resident_ctas"] == 2048 // 128
    assert found["launch.waves"] == found["launch.tail"] == 40 / (16 * 4)
    full = with_values(call, FAMILY, (32, "no"))
    assert "share" not in features_of(FAMILY, (32, "no"), full, {}, {})  # it divides by 0
    none = with_values(Call(**{**FACTS, "M": 0, "N": 64}), FAMILY, (32, "no"))
    empty = features_of(FAMILY, (32, "no"), none, {"M": 0}, {})
    assert "launch.waves" not in empty
    assert empty["launches"] == 0


def test_the_model_goes_before_distance_and_not_before_the_safe_kernel() -> None:
    assert [c.config for c in chosen(None, table())][:2] == [NEAR.config, "rows(threads=64)"]
    ranked = chosen(FEWER_THREADS, table())
    assert [c.config for c in ranked] == [
        "rows(threads=64)", "rows(threads=32)", NEAR.config, "safe()"]
    assert [c.ranking for c in ranked] == [FEWER_THREADS] * 3 + [None]


def test_distance_decides_where_the_model_sees_no_difference() -> None:
    assert chosen(FEWER_THREADS, table(), m=60)[0].config == FAR.config
    slight = Tree(("threads",), (96.0,), (0.0, 0.05))
    assert chosen(FEWER_THREADS._replace(trees=(slight,)), table())[0].config == NEAR.config


def test_what_the_device_cannot_launch_is_neither_near_nor_a_family() -> None:
    """The launches need 64 bytes of shared memory with 32 threads, 512 with 256."""
    small = table(facts={**FACTS, "smem_per_block": 128, "sm_count": 4})
    assert [c.config for c in chosen(None, small)] == [
        "rows(threads=64)", "rows(threads=32)", "safe()"]
    few = table(facts={**FACTS, "max_threads_per_block": 32})
    assert [c.config for c in chosen(None, few)] == ["rows(threads=32)", "safe()"]
    same = Row((8, 64), ("bf16",), ("N",), "k", "rows(threads=256)", always, bind, "same", 1.0)
    found = chosen(None, small._replace(rows=(same,)), m=9)
    assert [(c.step, c.config) for c in found][:1] == [("family", "rows(threads=64)")]


def test_of_starts_that_end_at_one_config_the_least_changed_counts() -> None:
    """A row of the very M has to be changed in three steps to what the other row is."""
    few = {**FACTS, "max_threads_per_block": 32}
    same = Row((60, 128), ("bf16",), ("N",), "k", "rows(threads=256)", always, bind, "same", 1.0)
    first = chosen(None, table(rows=(same, FAR), facts=few), m=60)[0]
    assert (first.config, first.row) == (FAR.config, FAR)


def test_rows_of_other_gpus_are_not_ranked_by_a_model() -> None:
    lent = table(rows=(), lent=(NEAR, FAR))
    assert [c.config for c in chosen(FEWER_THREADS, lent)] == [
        c.config for c in chosen(None, lent)]


def test_explain_names_the_model() -> None:
    def said(model: Ranking | None) -> str:
        first = chosen(model, table())[0]
        return repr(explanation(SIGNATURE, table(), first, {"M": 8, "N": 64}, ("bf16",), "cuda"))

    assert "by a model learnt from 7 recorded problems" in said(FEWER_THREADS)
    assert "by a model" not in said(None)


def test_winners_of_searches_are_starts_as_rows_are() -> None:
    """No row or first config has 256 threads: a search whose problem has no row found it."""
    threads = Tree(("threads",), (200.0,), (1.0, 0.0))
    model = Ranking(7, 0.0, (threads,))
    assert chosen(model, table())[0].config != "rows(threads=256)"
    won = model._replace(winners=(
        Winner("op", "rows(threads=256)", (9, 64), ("bf16",)),
        Winner("op", "renamed(threads=256)", (8, 64), ("bf16",)),
        Winner("op", "rows(lanes=256)", (8, 64), ("bf16",))))
    first = chosen(won, table())[0]
    assert (first.step, first.config, first.row) == ("family", "rows(threads=256)", None)
    # Legality goes first, whatever a search on another problem found.
    small = table(facts={**FACTS, "max_threads_per_block": 128})
    assert "rows(threads=256)" not in [c.config for c in chosen(won, small)]


def test_explain_names_the_search_that_a_config_won() -> None:
    won = FEWER_THREADS._replace(winners=(Winner("op", "rows(threads=256)", (8, 64), ("bf16",)),))
    first = chosen(won, table())[0]
    said = repr(explanation(SIGNATURE, table(), first, {"M": 8, "N": 64}, ("bf16",), "cuda"))
    assert "the config is the fastest of a search of M=8,N=64,dtype=bf16" in said
    few = table(rows=(FAR,), facts={**FACTS, "max_threads_per_block": 128})
    elsewhere = won._replace(winners=(won.winners[0]._replace(dims=(8, 65)),))
    adapted = next(c for c in chosen(elsewhere, few) if c.winner is not None)
    said = repr(explanation(SIGNATURE, few, adapted, {"M": 8, "N": 64}, ("bf16",), "cuda"))
    assert "the config began as the fastest of a search of M=8,N=65,dtype=bf16" in said
    assert "rows(threads=256)" in said.splitlines()[-1]


def test_the_winner_of_the_very_problem_goes_before_what_the_model_likes() -> None:
    at = Winner("op", "rows(threads=256)", (8, 64), ("bf16",))
    liked = FEWER_THREADS._replace(winners=(at,))
    assert chosen(liked, table())[0].config == "rows(threads=256)"
    elsewhere = FEWER_THREADS._replace(winners=(at._replace(dims=(8, 65)),))
    assert chosen(elsewhere, table())[0].config == "rows(threads=64)"
    other = FEWER_THREADS._replace(winners=(at._replace(operator="other"),))
    assert chosen(other, table())[0].config == "rows(threads=64)"
    unfit = table(facts={**FACTS, "max_threads_per_block": 128})
    assert chosen(liked, unfit)[0].config == "rows(threads=64)"


def test_only_the_nearest_winners_are_tried() -> None:
    near = tuple(Winner("op", "rows(threads=32)", (8 + n, 64), ("bf16",)) for n in range(8))
    far = Winner("op", "rows(threads=256)", (10**6, 64), ("bf16",))
    many_threads = Ranking(7, 0.0, (Tree(("threads",), (200.0,), (9.0, 0.0)),))
    assert chosen(many_threads._replace(winners=(far, *near[1:])), table())[0].config == far.config
    assert chosen(many_threads._replace(winners=(far, *near)), table())[0].config != far.config


def sample(m: int) -> Sample:
    """Few threads are fast for few rows, many for many; `noise` says nothing."""
    rows = [{"M": float(m), "threads": float(t), "noise": float((t * m) % 7)}
            for t in (32, 64, 128, 256)]
    best = 32 if m < 100 else 256
    slow = np.array([abs(math.log2(row["threads"] / best)) / 2 for row in rows])
    problem = Problem((("M", m), ("N", 64)), (("dtype", "bf16"),))
    return Sample("op", problem, tuple(f"rows(threads={t})" for t in (32, 64, 128, 256)),
                  tuple(rows), slow)


def test_a_learnt_model_orders_configs_and_its_text_is_the_model() -> None:
    known = [sample(m) for m in (1, 2, 5, 20, 400, 1000, 5000, 20000)]
    growth = Growth(trees=40, depth=3, rate=0.2, ridge=1.0, columns=1.0)
    model = ranking_from(known, growth)
    assert model.problems == 8

    def fastest(m: int) -> float:
        features = sample(m).features
        predicted = model.predicted(features)
        return features[predicted.index(min(predicted))]["threads"]

    assert (fastest(3), fastest(3000)) == (32, 256)
    assert model.winners[0] == Winner("op", "rows(threads=32)", (1, 64), ("bf16",))
    assert model.winners[-1] == Winner("op", "rows(threads=256)", (20000, 64), ("bf16",))
    few = known[0]
    assert ranking_from([*known, few]).winners == model.winners  # of one problem, the last search
    two = replace(few, problem=Problem((("M", 7), ("N", 64)), few.problem.dtypes),
                       configs=few.configs[:2], features=few.features[:2],
                       slowdowns=few.slowdowns[:2])
    with_two = ranking_from([*known, two], growth)
    assert (with_two.problems, with_two.trees) == (8, model.trees)  # two configs teach nothing
    assert len(with_two.winners) == 9
    long = model.winners[0]._replace(config=f"rows({', '.join(f'a{n}={n}' for n in range(30))})")
    model = model._replace(winners=(*model.winners, long))
    text = ranking_module("op", "h200", {"forward": model})
    assert max(len(line) for line in text.splitlines()) <= 100
    names: dict[str, Any] = {"Ranking": Ranking, "Tree": Tree, "Winner": Winner}
    exec(text.replace("from .._runtime.ranking import Ranking, Tree, Winner", ""), names)
    assert names["FORWARD"] == model
    again = ranking_from(known, growth)
    assert text == ranking_module(
        "op", "h200", {"forward": again._replace(winners=(*again.winners, long))})


def test_a_tuple_of_one_number_is_a_tuple() -> None:
    one = Ranking(1, 0.0, (Tree(("a",), (0.5,), (1.0, -2.5)),))
    names: dict[str, Any] = {"Ranking": Ranking, "Tree": Tree, "Winner": Winner}
    text = ranking_module("op", "h200", {"backward": one})
    exec(text.replace("from .._runtime.ranking import Ranking, Tree, Winner", ""), names)
    assert names["BACKWARD"] == one


def test_operators_with_equal_models_have_one_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first operator has the model; the library finds that of the other through its name."""
    own = {"h200": {"forward": RANKING}}
    other = {"h200": {"forward": RANKING._replace(problems=8)}}
    write_rankings(tmp_path, {"wkv6": own, "wkv5": own, "rmsnorm": other})
    modules: dict[tuple[str, str], SimpleNamespace] = {}
    for path in tmp_path.glob("*/*/ranking_h200.py"):
        names: dict[str, Any] = {"Ranking": Ranking, "Tree": Tree, "Winner": Winner}
        text = path.read_text(encoding="utf-8")
        exec(text.replace("from .._runtime.ranking import Ranking, Tree, Winner", ""), names)
        modules[f"lib.{path.parent.name}", path.stem] = SimpleNamespace(**names)
    assert not hasattr(modules["lib.wkv6", "ranking_h200"], "FORWARD")
    monkeypatch.setattr(pass_tables, "checked_module", lambda *name: modules[name])
    monkeypatch.setattr(
        PassTables, "_folder", property(lambda self: tmp_path / "kgen_ops" / self.operator))
    found = {name: PassTables(f"lib.{name}", "forward", name).ranking(GPU)
             for name in ("wkv5", "wkv6", "rmsnorm")}
    assert found["wkv5"] == found["wkv6"] == RANKING
    assert found["rmsnorm"] == other["h200"]["forward"]
