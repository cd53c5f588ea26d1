"""Predicted rows in the emitted library: marked, noticed at the first call, checked, replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.emit import Emitted, Winner, published_rows

EmitInto = Callable[[Path, Sequence[Winner]], Emitted]
MakeWinner = Callable[..., Winner]

PROBLEM = "M=8,N=16,dtype=fp32"
TABLE = "kgen_ops/rmsnorm/tables/host"

CALLS = """
import json, warnings
warnings.simplefilter("always")
import torch, kgen_ops
x, w = torch.randn(8, 16), torch.randn(16)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    y = [kgen_ops.rmsnorm(x, w, eps=1e-6) for _ in range(3)][-1]
want = x * w / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
why = kgen_ops.explain("rmsnorm", M=8, N=16, dtype="fp32", device="cpu")
print(json.dumps({
    "right": bool(torch.allclose(y, want, atol=1e-5)), "explained": str(why),
    "evidence": why.evidence, "record": why.record,
    "warned": [str(one.message) for one in seen
               if issubclass(one.category, kgen_ops.KgenPerformanceWarning)],
    "misses": len(kgen_ops.misses()),
}))
"""


def calls(folder: Path, cache: Path, **environment: str) -> dict[str, object]:
    """Call the library of a folder in a process of its own; return what was seen."""
    own = {name: value for name, value in os.environ.items() if name != "KGEN_WARN"}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300, check=False,
        env={**own, "PYTHONPATH": str(folder), "KGEN_CACHE_DIR": str(cache), **environment},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def texts(found: object) -> list[str]:
    """A list of texts, as JSON had it."""
    assert isinstance(found, list)
    return [str(one) for one in found]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def predicted(make_winner: MakeWinner) -> Winner:
    made = make_winner(PROBLEM, threads=32)
    return replace(made, predicted=True, record=replace(made.record, when="2026-03-01T00:00:00Z"))


def test_a_predicted_row_is_marked_noticed_and_replaced(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner, cache: Path
) -> None:
    row = predicted(make_winner)
    emit_into(tmp_path, [row])
    assert "origin: predicted" in (tmp_path / f"{TABLE}.yaml").read_text()
    assert 'evidence="predicted"' in (tmp_path / f"{TABLE}.py").read_text()
    assert "host (predicted)" in (tmp_path / "README.md").read_text()
    found = calls(tmp_path, cache)
    assert found["right"]
    assert found["misses"] == 0
    assert found["evidence"] == "predicted"
    assert "predicted, not measured: about 10.00 us" in str(found["explained"])
    (warned,) = texts(found["warned"])
    assert "was predicted, not measured: fixed_row(threads=32, vec=4)" in warned
    assert f"run: kgen tune --op rmsnorm --pass forward --gpu host --problem {PROBLEM}" in warned
    assert "silence: KGEN_WARN=0" in warned
    assert calls(tmp_path, cache, KGEN_WARN="0")["warned"] == []

    measured = make_winner(PROBLEM, threads=64)
    emit_into(tmp_path, [measured])
    emit_into(tmp_path, [row])  # a prediction after it changes nothing
    (left,) = published_rows(tmp_path, "rmsnorm", "host")
    assert (left.record, left.is_measured) == (measured.record.id, True)
    found = calls(tmp_path, cache)
    assert (found["evidence"], found["warned"]) == ("measured", [])
    assert "host (predicted)" not in (tmp_path / "README.md").read_text()


def test_a_predicted_kernel_that_is_wrong_here_does_not_serve(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner, cache: Path
) -> None:
    """It was verified elsewhere; its first call compares it with the safe kernel."""
    row = predicted(make_winner)
    wrong = row.rendered.source.replace("const float scale =", "const float scale = 2 *")
    assert wrong != row.rendered.source
    emit_into(tmp_path, [replace(row, rendered=replace(
        row.rendered, source=wrong, digest="0" * len(row.rendered.digest)))])
    found = calls(tmp_path, cache)
    assert found["right"]
    assert found["misses"] == 1
    assert not any("was predicted" in one for one in texts(found["warned"]))
    trusted = calls(tmp_path, cache, KGEN_CHECK="0")
    assert not trusted["right"], "without the check it would have served"


def test_predicted_rows_are_lent_to_no_other_gpu(
    tmp_path: Path, emit_into: EmitInto, make_winner: MakeWinner
) -> None:
    """Families of a GPU without a table begin with measured rows alone; one with predictions alone
    has the measured rows of others beside them.
    """
    h300 = replace(make_winner(PROBLEM, "h300"), predicted=True)
    emit_into(tmp_path, [h300, make_winner("M=512,N=16,dtype=fp32", "h200", threads=32)])
    script = (
        "import importlib\n"
        "tables = importlib.import_module('kgen_ops.rmsnorm').FORWARD.tables\n"
        "by_name = {gpu.name: gpu for gpu in tables.gpus()}\n"
        "for gpu in (None, by_name['h300'], by_name['h200']):\n"
        "    table = tables.of_gpu(gpu, gpu is not None, {})\n"
        "    print([r.dims[0] for r in table.rows], [r.dims[0] for r in table.lent])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] [512]", "[8] [512]", "[512] []"]
