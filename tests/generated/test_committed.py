"""The committed library is what today's kgen would emit, and every row has its evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import kgen.runtime
from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.emit.state import read_tables
from kgen.journal import Journal
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.report import load_report, print_report
from kgen.runtime.integrity import damages

pytestmark = pytest.mark.quick

LIBRARY = Path(__file__).resolve().parents[2] / "generated" / "kgen_ops"
# `make tune` on a machine without a GPU adds a host's report to the working tree.
REPORTS = sorted(p for p in LIBRARY.glob("*/reports/*.yaml") if p.stem != "host")
ids = [f"{p.parent.parent.name}-{p.stem}" for p in REPORTS]


# Operators that were tuned without timing peers beside the winner; `kgen bench` times them.
WITHOUT_PEERS = {"wkv4", "wkv5", "wkv5_decode", "wkv6", "wkv6_decode", "wkv7", "wkv7_decode"}


def test_there_are_results_for_the_h200() -> None:
    tuned = {p.parent.parent.name for p in REPORTS if p.stem == "h200"}
    assert tuned == set(open_catalogue().names)


def test_runtime_and_headers_are_todays() -> None:
    own = Path(kgen.runtime.__file__).parent
    for file in (*own.glob("*.py"), *own.glob("*.c"), *own.with_name("compat").glob("*.py")):
        folder = "_runtime" if file.parent == own else file.parent.name
        copy = LIBRARY / folder / file.name
        assert copy.read_bytes() == file.read_bytes(), f"run kgen emit: {copy} is stale"
    for theirs, ours in (("_runtime", own), ("compat", own.with_name("compat"))):
        names = {p.name for p in (LIBRARY / theirs).iterdir() if p.suffix in (".py", ".c")}
        assert names <= {p.name for p in ours.iterdir()}, "run kgen emit: a module is gone"
    for header in include_dir().rglob("*.cuh"):
        copy = LIBRARY / "_include" / header.relative_to(include_dir())
        assert copy.read_bytes() == header.read_bytes(), f"run kgen emit: {copy} is stale"
    include = LIBRARY / "_include"
    gone = [c for c in include.rglob("*.cuh")
            if not (include_dir() / c.relative_to(include)).exists()]
    assert not gone, "an emit leaves them, for rows may include them: remove, then kgen emit"


def test_its_list_is_todays() -> None:
    assert damages(LIBRARY) == [], "run kgen emit"


@pytest.mark.parametrize("path", REPORTS, ids=ids)
def test_every_row_has_its_record_and_its_kernel(path: Path) -> None:
    operator = path.parent.parent.name
    entry = open_catalogue().entry(operator)
    gpu = profile_named(path.stem)
    report = load_report(path)
    assert print_report(report)
    records = {r.id: r for r in Journal(path.with_suffix(".trials.jsonl")).read()}
    rows = {r.record: r for r in read_tables(LIBRARY / operator / "tables")[path.stem].rows}
    renderer = Renderer(include_dir())
    for found in report.problems:
        record = records[found.chosen.record]
        assert record.fate is Fate.VERIFIED
        assert record.problem == found.problem
        config = Config.of(found.chosen.variant, dict(found.chosen.config))
        assert record.config == config
        assert all(a.error <= a.bound for a in record.accuracy)
        if operator not in WITHOUT_PEERS:
            names = {p.name for p in found.peers}
            assert "torch.compile" in names
            # timex has two peers in plain PyTorch; `fft` is the faster one.
            assert "eager" in names or (operator == "timex" and "fft" in names)
        problem = parse_problem(found.problem, entry.operator.signature)
        variant = entry.space.variant(found.pass_name, config.variant)
        today = renderer.render(operator, entry.templates, variant, config, problem)
        row = rows[record.id]
        assert today.digest == row.kernel, f"{config.label}: its text changed; run kgen emit"
        assert record.code == row.code
        kernels = LIBRARY / operator / "kernels"
        assert (kernels / f"{today.digest}.cu").read_text(encoding="utf-8") == today.source
        assert (kernels / f"{today.digest}.{gpu.arch}.cubin").read_bytes()[:4] == b"\x7fELF"


def test_tables_and_reports_agree() -> None:
    for path in REPORTS:
        table = yaml.safe_load(
            (path.parent.parent / "tables" / path.name).read_text(encoding="utf-8")
        )
        text = (path.parent.parent / "tables" / f"{path.stem}.py").read_text(encoding="utf-8")
        for found in load_report(path).problems:
            assert found.chosen.record in text
            assert found.chosen.record in str(table)
