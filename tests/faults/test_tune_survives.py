"""Planted faults among healthy configs, tuned for real on the host layer: each becomes the fate it
is, none wins, and the healthy configs are found all the same."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.build import Compiler, open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import TuneError, VerifyError
from kgen.journal import Journal
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.tune import Progress, TuneRequest, TuneResult, tune
from kgen.worker import handle

SOFTMAX = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "softmax"

# What `${fault}` turns into, at a place where every thread passes.
FAULTS = {
    "none": "",
    "crash": "if (n == 7) *reinterpret_cast<volatile int*>(8) = 1;",
    "wrong": "if (row == 3 && n == 5) { y_row[n] = kgen::from_float<T>(0.5f); continue; }",
    # Seen by no trial: of the sizes tried, only a certificate's have 63 rows.
    "ragged": "if (gridDim.x == 63 && n == 1) continue;",
    "unwritten": "if (row == 2 && n == 1) continue;",
    "past_end": "if (row == 0 && n == 0) y_row[-1] = kgen::from_float<T>(0.0f);",
    "divergent": "if (n == 0) kgen::sync_block();",
    "broken": "this is not C++;",
    "endless": "while (largest == largest) { kgen::sync_warp(); }",
}
WANTED = {
    "none": Fate.VERIFIED,
    "crash": Fate.CRASHED,
    "wrong": Fate.WRONG,
    "unwritten": Fate.WRONG,
    "past_end": Fate.WRONG,
    "divergent": Fate.CRASHED,
    "broken": Fate.BUILD_FAILED,
    "endless": Fate.TIMED_OUT,
}


@pytest.fixture
def compiler() -> Compiler:
    return open_compiler("host", [include_dir()])


def plant(folder: Path, faults: list[str]) -> Path:
    """A copy of the softmax operator whose configs carry the faults."""
    mine = folder / "mine"
    shutil.copytree(SOFTMAX, mine)
    template = mine / "templates" / "softmax" / "forward_block_per_row.cu.jinja"
    text = template.read_text()
    anchor = "        y_row[n] = kgen::from_float<T>(kgen::exp("
    assert anchor in text
    lines = ["{"]
    for name in faults:
        if FAULTS[name]:
            lines += [f'//% if fault == "{name}"', f"        {FAULTS[name]}", "//% endif"]
    planted = "\n".join(lines) + "\n" + anchor
    text = text.replace(anchor, planted).replace("/ sum);", "/ sum); }", 1)
    text = text.replace("constexpr int kThreads", "// fault: ${fault}\nconstexpr int kThreads", 1)
    template.write_text(text)
    space = mine / "search_spaces" / "softmax.yaml"
    space.write_text(
        space.read_text()
        .replace(
            "threads: [32, 64, 128, 256, 512, 1024]",
            f"threads: [32, 64]\n        fault: [{', '.join(faults)}]",
        )
        .replace("safe: {threads: 128}", "safe: {threads: 32, fault: none}")
    )
    return mine


def request(
    folder: Path,
    mine: Path,
    compiler: Compiler,
    trials: int = 40,
    seen: list[Progress] | None = None,
) -> TuneRequest:
    entry = open_catalogue([mine]).entry("softmax")
    return TuneRequest(
        entry=entry,
        pass_name="forward",
        problems=(parse_problem("M=9,N=64,dtype=fp32", entry.operator.signature),),
        gpu=profile_named("host"),
        ordinal=0,
        compiler=compiler,
        journal=folder / "host.trials.jsonl",
        study=folder / "host.optuna.log",
        trials=40,
        time_s=None,
        seed=0,
        paths=(str(mine),),
        peers=False,
        on_progress=seen.append if seen is not None else lambda progress: None,
    )


def fates(folder: Path) -> dict[str, set[Fate]]:
    found: dict[str, set[Fate]] = {}
    for record in Journal(folder / "host.trials.jsonl").read():
        found.setdefault(str(record.config.as_dict()["fault"]), set()).add(record.fate)
    return found


def test_every_fault_gets_its_fate_and_none_wins(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An endless kernel must cost the test seconds, not the default's half minute; a healthy one on
    # a loaded machine must still have time for its first input sets.
    real = handle.WorkerHandle.__init__

    def impatient(self: handle.WorkerHandle, setup: object, trial_timeout_s: float = 12.0) -> None:
        real(self, setup, trial_timeout_s=12.0)  # type: ignore[arg-type]

    monkeypatch.setattr(handle.WorkerHandle, "__init__", impatient)
    mine = plant(tmp_path, list(FAULTS))
    result: TuneResult = tune(request(tmp_path, mine, compiler))
    assert result.results[0].winner.config.as_dict()["fault"] == "none"
    assert result.worker_restarts >= 3  # two crashes' worth of threads, and the endless ones
    for fault, found in fates(tmp_path).items():
        if fault == "ragged":  # verified by its trial, refused if it came to a certificate
            assert found <= {Fate.VERIFIED, Fate.WRONG}
        else:
            assert found == {WANTED[fault]}, fault
    records = list(Journal(tmp_path / "host.trials.jsonl").read())
    divergent = next(r for r in records if r.config.as_dict()["fault"] == "divergent")
    assert "barrier" in divergent.reason
    crash = next(r for r in records if r.config.as_dict()["fault"] == "crash")
    assert "SIGSEGV" in crash.reason
    broken = next(r for r in records if r.config.as_dict()["fault"] == "broken")
    assert "source:" in broken.reason


@pytest.mark.parametrize("fault", ["wrong", "ragged"])
def test_all_wrong_is_an_error_with_the_reason(
    tmp_path: Path, compiler: Compiler, fault: str
) -> None:
    """At the latest its certificate stops a wrong kernel."""
    mine = plant(tmp_path, ["none", fault])
    space = mine / "search_spaces" / "softmax.yaml"
    space.write_text(
        space.read_text().replace(
            "      launch:",
            "      require:\n"
            f"        - {{rule: fault == '{fault}' or N == 67, why: planted}}\n"
            "      launch:",
        )
    )
    with pytest.raises(TuneError) as caught:
        tune(request(tmp_path, mine, compiler))
    assert "elements" in str(caught.value)
    assert "out of bound" in str(caught.value)


def test_a_second_tune_repeats_nothing(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none", "wrong", "broken"])
    tune(request(tmp_path, mine, compiler))
    before = Counter(
        (r.config, r.timing is not None) for r in Journal(tmp_path / "host.trials.jsonl").read()
    )
    seen: list[Progress] = []
    again = tune(request(tmp_path, mine, compiler, seen=seen))
    assert again.results[0].new_trials == 0
    assert seen[0].trials == 6
    after = list(Journal(tmp_path / "host.trials.jsonl").read())
    # Only certificates of finalists were added.
    assert 1 <= len(after) - sum(before.values()) <= 2
    assert {r.fate for r in after[sum(before.values()) :]} == {Fate.VERIFIED}


def test_an_edited_template_is_tried_anew(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none", "wrong"])
    first = tune(request(tmp_path, mine, compiler))
    template = mine / "templates" / "softmax" / "forward_block_per_row.cu.jinja"
    template.write_text(template.read_text() + "\n// edited\n")
    second = tune(request(tmp_path, mine, compiler))
    assert first.results[0].new_trials == second.results[0].new_trials == 4


def test_a_lost_journal_means_a_fresh_study(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none"])
    tune(request(tmp_path, mine, compiler))
    (tmp_path / "host.trials.jsonl").unlink()
    assert tune(request(tmp_path, mine, compiler)).results[0].new_trials == 2


def test_configs_that_compile_to_the_same_code_are_measured_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    mine = plant(tmp_path, ["none", "wrong"])
    template = mine / "templates" / "softmax" / "forward_block_per_row.cu.jinja"
    template.write_text(template.read_text().replace('//% if fault == "wrong"', "//% if false"))
    result = tune(request(tmp_path, mine, compiler))
    times: dict[int, set[float]] = {}
    for record in Journal(tmp_path / "host.trials.jsonl").read():
        if record.timing:
            times.setdefault(int(record.config.as_dict()["threads"]), set()).add(
                record.timing.median_us
            )
    assert result.results[0].new_trials == 4
    assert all(len(found) == 1 for found in times.values()), times


def test_the_study_opens_in_optuna(tmp_path: Path, compiler: Compiler) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    mine = plant(tmp_path, ["none", "wrong"])
    tune(request(tmp_path, mine, compiler))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "host.optuna.log")))
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert summary.study_name.startswith("softmax/forward/host/M=9,N=64,dtype=fp32@")
    assert Counter(t.user_attrs["fate"] for t in study.trials) == {"verified": 2, "wrong": 2}
    assert study.best_trial.params["block_per_row.fault"] == "none"


def test_a_faulty_operator_module_ends_the_tune(tmp_path: Path, compiler: Compiler) -> None:
    """No config can mend it, so it must not be booked as forty crashes."""
    mine = plant(tmp_path, ["none"])
    module = mine / "operators" / "softmax.py"
    text = module.read_text()
    assert 'return {"y": inputs["x"].softmax(dim=-1)}' in text
    module.write_text(text.replace('return {"y": inputs', 'return {"z": inputs'))
    with pytest.raises(VerifyError, match="y"):
        tune(request(tmp_path, mine, compiler))
    assert list(Journal(tmp_path / "host.trials.jsonl").read()) == []
