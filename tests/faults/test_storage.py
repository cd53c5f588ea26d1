"""Full disks, damaged files, and two tuners at once."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from planting import compiler_for, journal_path, plant, records, request, run_tune

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.errors import StorageError
from kgen.journal import Journal
from kgen.model.record import Fate
from kgen.runtime.cache import Cache

FOLDER = Path(__file__).parent


def test_a_full_disk_ends_the_tune_and_loses_nothing(tmp_path: Path) -> None:
    mine = plant(tmp_path, ["none", "unwritten"])
    compiler = compiler_for("host")
    run_tune(request(tmp_path, mine, compiler))
    whole = journal_path(tmp_path).read_bytes()
    first_two = b"".join(whole.splitlines(keepends=True)[:1])
    journal_path(tmp_path).write_bytes(first_two)
    (tmp_path / "optuna.log").unlink()
    # The disk has room for half of the next record.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first_two) + 200, before[1]))
    try:
        with pytest.raises(StorageError, match="the trials written so far are kept"):
            run_tune(request(tmp_path, mine, compiler))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal_path(tmp_path).read_bytes() == first_two, "half a record was left behind"
    result = run_tune(request(tmp_path, mine, compiler))
    compiler.close()
    assert result.results[0].winner.config.as_dict()["fault"] == "none"
    assert records(tmp_path)[0].id == json_id(first_two)


def json_id(line: bytes) -> str:
    from kgen.journal import record_from_dict

    return record_from_dict(json.loads(line)).id


@pytest.mark.parametrize(("cut", "lost"), [(1, 0), (37, 1), (200, 1)])
def test_a_truncated_journal_costs_the_last_record_at_most(
    tmp_path: Path, cut: int, lost: int
) -> None:
    mine = plant(tmp_path, ["none", "unwritten", "past_end"])
    compiler = compiler_for("host")
    run_tune(request(tmp_path, mine, compiler))
    before = records(tmp_path)
    path = journal_path(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = [r.id for r in before[: len(before) - lost]]
    assert [r.id for r in records(tmp_path)] == kept
    result = run_tune(request(tmp_path, mine, compiler))
    compiler.close()
    assert result.results[0].winner.config.as_dict()["fault"] == "none"
    after = Journal(path)
    ids = [r.id for r in after.read()]
    assert ids[: len(kept)] == kept
    assert after.skipped_lines == lost


def test_a_damaged_cache_entry_is_built_anew(tmp_path: Path) -> None:
    """A cache entry that differs from what was stored must be neither loaded nor timed."""
    damages = ("truncated", "flipped", "empty", "another")
    mine = plant(tmp_path, ["none"], threads=(32, 64, 128, 256))
    cache = Cache(tmp_path / "cache")
    compiler = open_compiler("host", [include_dir()], cache)
    run_tune(request(tmp_path, mine, compiler))
    compiler.close()
    built = sorted((tmp_path / "cache").rglob("*.so"))
    assert len(built) >= len(damages)
    for path, damage in zip(built, itertools.cycle(damages), strict=False):
        content = bytearray(path.read_bytes())
        match damage:
            case "truncated":
                content = content[: len(content) // 2]
            case "flipped":
                content[len(content) // 2] ^= 0xFF
            case "empty":
                content = bytearray()
            case "another":
                content = bytearray(b"\x7fELF no module at all")
        path.chmod(0o644)
        path.write_bytes(content)
    journal_path(tmp_path).unlink()
    compiler = open_compiler("host", [include_dir()], Cache(tmp_path / "cache"))
    result = run_tune(request(tmp_path, mine, compiler))
    compiler.close()
    assert {r.fate for r in records(tmp_path)} == {Fate.VERIFIED}
    assert result.worker_restarts == 0


def test_two_tuners_share_a_cache_and_an_output(tmp_path: Path) -> None:
    """Both succeed, the library has the results of both, and every line of the journal is whole."""
    mine = plant(tmp_path, ["none", "unwritten"], threads=(64, 128))
    environment = {**os.environ, "KGEN_CACHE_DIR": str(tmp_path / "cache")}
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kgen", "tune", "--op", "planted", "--gpu", "host"),
                *("--path", str(mine), "--out", str(tmp_path / "out"), "--no-peers"),
                *("--problem", problem),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for problem in ("M=9,N=64", "M=33,N=100")
    ]
    for process in running:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, out + error
    library = tmp_path / "out" / "kgen_ops"
    journal = Journal(library / "planted" / "reports" / "host.trials.jsonl")
    problems = {r.problem.rpartition(",dtype")[0] for r in journal.read() if r.timing}
    assert journal.skipped_lines == 0
    assert problems == {"M=9,N=64", "M=33,N=100"}
    check = (
        "import torch, kgen_ops\n"
        "for m, n in ((9, 64), (33, 100)):\n"
        "    x = torch.randn(m, n)\n"
        "    y = kgen_ops.planted(x)\n"
        "    assert torch.allclose(y, x.flip(-1) + x.sum(-1, keepdim=True), atol=1e-4)\n"
        "    print(kgen_ops.explain('planted', M=m, N=n, dtype='fp32', device='cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(tmp_path / "out")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exact") == 2, done.stdout
