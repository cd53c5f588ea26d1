"""A tune after an earlier one: what it does with the records, the study and changed templates."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from planting import run_tune

from kgen.assets import include_dir
from kgen.build import Compiler, open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import VerifyError
from kgen.journal import Journal
from kgen.model.problem import parse_problem
from kgen.tune import Progress, TuneRequest

SOFTMAX = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "softmax"

# The replacements of `${fault}`, which is at a place that every thread passes.
FAULTS = {
    "none": "",
    "wrong": "if (row == 3 && n == 5) { y_row[n] = kgen::from_float<T>(0.5f); continue; }",
    "broken": "this is not C++;",
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
    time_s: float | None = None,
) -> TuneRequest:
    entry = open_catalogue([mine]).entry("softmax")
    return TuneRequest(
        entry=entry,
        passes=("forward",),
        problems={
            "forward": (parse_problem("M=9,N=64,dtype=fp32", entry.operator.signature),)
        },
        gpu=profile_named("host"),
        ordinal=0,
        compiler=compiler,
        journal=folder / "host.trials.jsonl",
        study=folder / "host.optuna.log",
        trials=40,
        time_s=time_s,
        seed=0,
        paths=(str(mine),),
        against=(),
    )


def test_a_second_tune_repeats_nothing(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none", "wrong", "broken"])
    run_tune(request(tmp_path, mine, compiler))
    before = Counter(
        (r.config, r.timing is not None) for r in Journal(tmp_path / "host.trials.jsonl").read()
    )
    seen: list[Progress] = []
    again = run_tune(request(tmp_path, mine, compiler), seen.append)
    assert again.results[0].new_trials == 0
    assert seen[0].trials == 6
    after = list(Journal(tmp_path / "host.trials.jsonl").read())
    assert len(after) == sum(before.values())  # certificates are kept, too


def edit(mine: Path, old: str, new: str) -> None:
    """Replace what stands once in the planted template."""
    template = mine / "templates" / "softmax" / "forward_block_per_row.cu.jinja"
    text = template.read_text()
    assert text.count(old) == 1
    template.write_text(text.replace(old, new))


def test_a_template_whose_code_changed_is_tried_anew(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none", "wrong"])
    first = run_tune(request(tmp_path, mine, compiler))
    edit(mine, "/ sum); }", "/ sum + 0.0f); }")
    second = run_tune(request(tmp_path, mine, compiler))
    assert first.results[0].new_trials == second.results[0].new_trials == 4


def test_a_comment_in_a_template_lets_no_record_go(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none", "wrong"])
    first = run_tune(request(tmp_path, mine, compiler))
    edit(mine, "// fault:", "// the planted fault:")
    second = run_tune(request(tmp_path, mine, compiler))
    assert (first.results[0].new_trials, second.results[0].new_trials) == (4, 0)


def test_a_lost_journal_means_a_fresh_study(tmp_path: Path, compiler: Compiler) -> None:
    mine = plant(tmp_path, ["none"])
    run_tune(request(tmp_path, mine, compiler))
    (tmp_path / "host.trials.jsonl").unlink()
    assert run_tune(request(tmp_path, mine, compiler)).results[0].new_trials == 2


def test_configs_that_compile_to_the_same_code_are_measured_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    mine = plant(tmp_path, ["none", "wrong"])
    template = mine / "templates" / "softmax" / "forward_block_per_row.cu.jinja"
    template.write_text(template.read_text().replace('//% if fault == "wrong"', "//% if false"))
    result = run_tune(request(tmp_path, mine, compiler))
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
    run_tune(request(tmp_path, mine, compiler))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "host.optuna.log")))
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert summary.study_name.startswith("softmax/forward/host/M=9,N=64,dtype=fp32@")
    assert Counter(t.user_attrs["fate"] for t in study.trials) == {"verified": 2, "wrong": 2}
    assert study.best_trial.params["block_per_row.fault"] == "none"


def test_a_faulty_operator_module_ends_the_tune(tmp_path: Path, compiler: Compiler) -> None:
    """No config can avoid the failure, so it must not be recorded as forty crashes."""
    mine = plant(tmp_path, ["none"])
    module = mine / "operators" / "softmax.py"
    text = module.read_text()
    assert 'return {"y": inputs["x"].softmax(dim=-1)}' in text
    module.write_text(text.replace('return {"y": inputs', 'return {"z": inputs'))
    with pytest.raises(VerifyError, match="y"):
        run_tune(request(tmp_path, mine, compiler))
    assert list(Journal(tmp_path / "host.trials.jsonl").read()) == []


@pytest.mark.parametrize("function", ["definition", "make_inputs"])
def test_an_exit_of_an_operator_module_ends_the_tune(
    tmp_path: Path, compiler: Compiler, function: str
) -> None:
    mine = plant(tmp_path, ["none"])
    with (mine / "operators" / "softmax.py").open("a") as module:
        module.write(f"\nimport dataclasses, sys\nOPERATOR = dataclasses.replace("
                     f"OPERATOR, {function}=lambda *_: sys.exit(0))\n")
    with pytest.raises(VerifyError, match=r"operator's module called sys\.exit\(0\)"):
        run_tune(request(tmp_path, mine, compiler))
    assert list(Journal(tmp_path / "host.trials.jsonl").read()) == []


def test_a_tune_out_of_time_still_ends_with_a_result(tmp_path: Path, compiler: Compiler) -> None:
    """The last problems of a list must get trials; without any the whole tune would fail."""
    mine = plant(tmp_path, ["none", "wrong"])
    result = run_tune(request(tmp_path, mine, compiler, time_s=1e-3))
    assert result.results[0].winner.config.as_dict()["fault"] == "none"
