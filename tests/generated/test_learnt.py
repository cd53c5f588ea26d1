"""Learnt rules in the emitted library: written, kept, dropped, and followed by a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.emit import Emitted, Winner, emit_rules, published_table, rewrite
from kgen.emit.state import LEARNT, read_table
from kgen.errors import CatalogueError
from kgen.model.rule_tree import Leaf, LearntRule, Split
from kgen.operators.base import Operator

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

ROOT = Path(__file__).parents[2]
TABLE = "kgen_ops/rmsnorm/tables/host"
DTYPES = (("dtype", "fp32"), ("w_dtype", "fp32"), ("residual_dtype", "none"),
          ("rstd_dtype", "none"))


class Library:
    """A library with two rows of N = 16, one of N = 32, and a rule that is not the nearest row."""

    def __init__(self, folder: Path, emit_into: EmitInto, make: MakeWinner, operator: Operator):
        self.folder, self.emit_into, self.operator = folder, emit_into, operator
        self.small = make("M=8,N=16,dtype=fp32", threads=32)
        self.large = make("M=512,N=16,dtype=fp32", threads=64)
        self.other = make("M=8,N=32,dtype=fp32")
        self.new = replace(make("M=100,N=16,dtype=fp32", threads=32), searched=False)
        emit_into(folder, [self.small, self.large, self.other])

    def rule(self, below: Winner, above: Winner, at_most: int = 20) -> LearntRule:
        """For N = 16."""
        tree = Split(("M",), at_most, Leaf((below.record.id,)),
                     Leaf((above.record.id, self.small.record.id)))
        return LearntRule("forward", DTYPES, (("N", 16),), tree, 7, 0.0123, 0.2)

    def learn(self, *rules: LearntRule, new: Sequence[Winner] = ()) -> Emitted:
        """Emit rules, with rows."""
        return emit_rules(self.folder, self.operator, self.small.gpu, rules, new, include_dir())

    @property
    def rules(self) -> tuple[LearntRule, ...]:
        """As its state has them."""
        return read_table(self.folder / f"{TABLE}.yaml").rules

    @property
    def text(self) -> str:
        """Its table."""
        return (self.folder / f"{TABLE}.py").read_text()


@pytest.fixture
def library(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner, operator: Operator
) -> Library:
    """In a folder of its own."""
    return Library(tmp_path, emit_into, make_winner, operator)


def test_a_rule_is_readable_python_and_its_state_reads_back(library: Library) -> None:
    before = library.text
    assert "_RULES" not in before
    rule = library.rule(library.large, library.new)
    library.learn(rule, new=[library.new])
    assert library.rules == (rule,)
    large, small, new = (w.record.id for w in (library.large, library.small, library.new))
    assert (
        "def forward_rule_1(call: Call) -> tuple[str, ...]:\n"
        '    """Rows for N=16, dtype=fp32, w_dtype=fp32, residual_dtype=none, rstd_dtype=none, the '
        "preferred\n    first.\n"
        '    """\n'
        "    if call.M <= 20:\n"
        f'        return ("{large}",)\n'
        f'    return ("{new}", "{small}")\n'
    ) in library.text
    assert 'evidence="measured while a rule was learnt"' in library.text
    rows = {r.record: r for r in read_table(library.folder / f"{TABLE}.yaml").rows}
    assert rows[new].origin == LEARNT
    assert rows[small].origin == "tuned"


def test_the_same_rules_give_the_same_bytes(library: Library) -> None:
    rule = library.rule(library.large, library.new)
    library.learn(rule, new=[library.new])
    text = library.text
    assert library.learn(rule, new=[library.new]).changed == ()
    assert rewrite(library.folder, lambda name: library.operator, include_dir()).changed == ()
    library.learn(library.rule(library.small, library.large, at_most=30))
    assert "if call.M <= 30:" in library.text
    assert library.new.record.id not in library.text, "no rule names its row any more"
    library.learn(rule, new=[library.new])
    assert library.text == text


def test_a_tune_keeps_a_rule_as_long_as_its_rows_are_there(
    library: Library, make_winner: MakeWinner
) -> None:
    library.learn(library.rule(library.large, library.new), new=[library.new])
    library.emit_into(library.folder, [make_winner("M=9,N=16,dtype=fp32")])
    (kept,) = library.rules
    assert kept.problems == 7
    again = make_winner("M=512,N=16,dtype=fp32", threads=32)
    again = replace(again, record=replace(again.record, when="2026-02-01T00:00:00Z"))
    library.emit_into(library.folder, [again])
    assert not list(library.rules)
    assert "_RULES" not in library.text
    assert library.new.record.id in library.text, "its row was measured all the same"


def test_a_rule_needs_a_library(tmp_path: Path, library: Library) -> None:
    rule = library.rule(library.small, library.large)
    with pytest.raises(CatalogueError, match="there is no library"):
        emit_rules(tmp_path / "none", library.operator, library.small.gpu, [rule], [], "include")
    with pytest.raises(CatalogueError, match=r"not tuned for b200.*\n.*kgen tune --op rmsnorm"):
        published_table(library.folder, "rmsnorm", "b200")


def test_generated_rules_are_clean(library: Library) -> None:
    deep = Split(("M", "N"), 64, Leaf((library.small.record.id,)),
                 library.rule(library.small, library.large).tree)
    library.learn(replace(library.rule(library.small, library.large), tree=deep))
    assert "if call.M * call.N <= 64:" in library.text
    for command in (["ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."],
                    ["mypy", "--no-error-summary", "--config-file", str(ROOT / "pyproject.toml"),
                     "--cache-dir", str(ROOT / ".mypy_cache"), "--no-warn-return-any", "kgen_ops"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=library.folder, check=False,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


SCRIPT = """
import json, torch, kgen_ops

def step(m, n):
    why = kgen_ops.explain("rmsnorm", M=m, N=n, dtype="fp32", device="cpu")
    return [why.step, why.record, why.path, str(why)]

def launched(x):
    forward, w = kgen_ops.rmsnorm.__globals__["FORWARD"], torch.randn(x.shape[1])
    before = set(forward.prepared)
    y = kgen_ops.rmsnorm(x, w)
    want = torch.nn.functional.rms_norm(x, x.shape[1:], w, 1e-6)
    torch.testing.assert_close(y, want)
    (key,) = set(forward.prepared) - before
    return forward.prepared[key].launch.__qualname__.partition(".")[0]

odd = torch.randn(30 * 18)[:].view(30, 18)[:, :16]  # rows 72 bytes apart, which no row takes
print(json.dumps({
    "exact": step(8, 16), "low": step(10, 16), "high": step(60, 16), "other": step(9, 32),
    "safe": step(8, 48), "calls": [launched(torch.randn(10, 16)), launched(torch.randn(60, 16)),
                                   launched(odd)],
}))
"""


def test_calls_follow_the_rule(library: Library, tmp_path: Path) -> None:
    """Exact, then learnt, then nearest, then safe; the rule says the opposite of the nearest."""
    library.learn(library.rule(library.large, library.new), new=[library.new])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(library.folder),
             "KGEN_CACHE_DIR": str(tmp_path / "cache")}, cwd=library.folder,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exact"][:3] == ["exact", library.small.record.id, ""]
    assert found["low"][:3] == ["learnt", library.large.record.id, "M = 10 <= 20"]
    assert found["high"][:3] == ["learnt", library.new.record.id, "M = 60 > 20"]
    assert found["other"][:2] == ["nearest", library.other.record.id]
    assert found["safe"][0] == "safe"
    assert "learnt from 7 problems, 1.2 % above" in found["high"][3]
    assert "measured while a rule was learnt: 10.00 us at M=100" in found["high"][3]
    low, high, odd = found["calls"]
    assert low.startswith("fixed_row")
    assert high.startswith("fixed_row")
    assert low != high
    assert odd.startswith("any_row")
