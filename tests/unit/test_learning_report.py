"""The report of learnt rules: written, read, merged, judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.errors import RecordError
from kgen.learn.report import (
    HeldOut,
    LearnReport,
    RuleReport,
    TrainingProblem,
    judged,
    load_learning,
    merge_learning,
    print_learning,
    write_learning,
)
from kgen.report import Environment


def held_out(m: int, loss: float, nearest: float | None, covers: str = "N=64") -> HeldOut:
    return HeldOut("forward", f"M={m},{covers}", covers, "1a2b", 10.0 * (1 + loss), 10.0, "c(x=1)",
                   loss, None if nearest is None else 10.0 * (1 + nearest), nearest, 30)


def report(*found: HeldOut, covers: str = "N=64") -> LearnReport:
    rule = RuleReport("forward", covers, ("M <= 8:", "  1a2b", "else:", "  3c4d"), ("3c4d",), 0.01,
                      0.02, (TrainingProblem(f"M=8,{covers}", 9.0, "c(x=1)", 0.0),))
    environment = Environment("GPU", "1", "nvrtc", "13", "2", "3", "0", "")
    return LearnReport("op", "h200", environment, judged(found), found, (rule,))


def test_it_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "learnt" / "h200.yaml"
    written = report(held_out(9, 0.125, None), held_out(20, 0.0, 0.5))
    write_learning(path, written)
    assert load_learning(path) == written
    path.write_text(path.read_text().replace("    loss: 0.125", "    loss: much"))
    with pytest.raises(RecordError, match=r"h200.yaml:\d+: held_out\[0\].loss"):
        load_learning(path)


def test_the_verdict_counts_each_side_where_it_has_a_row() -> None:
    verdict = judged([held_out(9, 0.125, None), held_out(20, 0.025, 0.5)])
    assert verdict is not None
    assert (verdict.problems, verdict.mean_loss, verdict.worst_loss) == (2, 0.075, 0.125)
    assert (verdict.nearest_mean_loss, verdict.nearest_worst_loss) == (0.5, 0.5)
    alone = judged([held_out(9, 0.125, None)])
    assert alone is not None
    assert alone.nearest_mean_loss is None
    assert judged([]) is None


def test_what_was_learnt_again_replaces_what_was_there() -> None:
    old = report(held_out(9, 0.3, None))
    other = report(held_out(9, 0.1, None, "N=128"), covers="N=128")
    both = merge_learning(old, other)
    assert [rule.covers for rule in both.rules] == ["N=64", "N=128"]
    assert both.verdict is not None
    assert both.verdict.mean_loss == pytest.approx(0.2)
    again = merge_learning(both, report(held_out(11, 0.0, None)))
    assert [rule.covers for rule in again.rules] == ["N=128", "N=64"]
    assert [found.problem for found in again.held_out] == ["M=9,N=128", "M=11,N=64"]
    assert merge_learning(None, old) == old


def test_it_prints() -> None:
    text = print_learning(report(held_out(9, 0.125, None), held_out(20, 0.0, 0.5)))
    assert "forward N=64\n    M <= 8:\n      1a2b\n" in text
    assert "loss 12.5 %; nearest no row" in text
    assert text.endswith("2 problems held out: mean loss 6.2 %, worst 12.5 %; nearest row: mean "
                         "50.0 %, worst 50.0 %")
