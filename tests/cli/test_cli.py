"""The command-line tool, run as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tuned_rmsnorm import TINY, tune_arguments

from kgen.report import load_report

OTHER = "M=34,N=128,dtype=fp32"
SOFTMAX = str(Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "softmax")
JOURNAL = "generated/kgen_ops/rmsnorm/reports/host.trials.jsonl"


def kgen(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kgen", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def tune(
    cwd: Path, *more: str, trials: int = 4, problem: str = TINY
) -> subprocess.CompletedProcess[str]:
    return kgen(*tune_arguments(problem, trials), *more, cwd=cwd)


@pytest.fixture
def copied(tuned: Path, tmp_path: Path) -> Path:
    """A copy of `tuned`: a tune of another problem need not certify the safe variant again."""
    folder = tmp_path / "copy"
    shutil.copytree(tuned, folder)
    return folder


@pytest.mark.quick
def test_help_and_lists(tmp_path: Path) -> None:
    for arguments in (["--help"], ["ops"], ["gpus"], ["tune", "--help"], ["--version"]):
        done = kgen(*arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert done.stdout
        assert not done.stderr
    listed = kgen("ops", cwd=tmp_path).stdout
    assert "rmsnorm" in listed
    assert "naive" in listed
    assert "h200" in kgen("gpus", cwd=tmp_path).stdout


@pytest.mark.quick
def test_light_commands_load_no_heavy_package(tmp_path: Path) -> None:
    """That is why they answer in 0.3 s; the time itself is not tested."""
    script = (
        "import sys\n"
        "from kgen.cli.main import main\n"
        "main(['ops']); main(['gpus'])\n"
        "heavy = {'torch', 'optuna', 'numpy', 'triton', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_command_prints_help(tmp_path: Path) -> None:
    done = kgen(cwd=tmp_path)
    assert done.returncode == 2
    assert "tune" in done.stdout


@pytest.mark.quick
def test_tune_writes_library_report_and_journal(tuned: Path) -> None:
    reports = tuned / "generated" / "kgen_ops" / "rmsnorm" / "reports"
    report = load_report(reports / "host.yaml")
    (problem,) = report.problems
    assert problem.trials.count == 4
    assert problem.chosen.timing.median_us > 0
    assert problem.accuracy[0].error <= problem.accuracy[0].bound
    assert (reports / "host.optuna.log").is_file()
    # Four trials, a certificate per finalist, and one per dtype combination of the safe variant.
    assert len((reports / "host.trials.jsonl").read_text().splitlines()) > 4


@pytest.mark.quick
def test_report_prints(tuned: Path) -> None:
    done = kgen("report", "--op", "rmsnorm", cwd=tuned)
    assert done.returncode == 0
    assert "forward: " in done.stdout
    assert "M33 N128" in done.stdout
    assert "M=33,N=128" in kgen("report", "--full", cwd=tuned).stdout
    assert kgen("report", "--gpu", "h200", cwd=tuned).returncode == 2


@pytest.mark.quick
def test_library_works_without_kgen(tuned: Path) -> None:
    script = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'kgen', 'jinja2', 'optuna', 'yaml'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import torch, kgen_ops\n"
        "x, w = torch.randn(33, 128), torch.randn(128)\n"
        "want = torch.nn.functional.rms_norm(x, (128,), w, 1e-6)\n"
        "torch.testing.assert_close(kgen_ops.rmsnorm(x, w), want)\n"
        "y = kgen_ops.rmsnorm(x.bfloat16()[:, :77].contiguous(), w[:77].bfloat16())\n"
        "assert y.shape == (33, 77)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tuned / "generated",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_same_command_resumes(tuned: Path) -> None:
    journal = tuned / "generated" / "kgen_ops" / "rmsnorm" / "reports" / "host.trials.jsonl"
    before = journal.read_text().splitlines()
    done = tune(tuned)
    assert done.returncode == 0, done.stderr
    assert "trial 4/4" in done.stdout
    after = journal.read_text().splitlines()
    assert after[: len(before)] == before
    # Another finalist may win the finals by noise, and gets the host run that it has not had yet.
    added = [json.loads(line) for line in after[len(before) :]]
    assert all("host" in record.get("evidence", {}) for record in added), "something was repeated"
    assert len(added) <= 1
    assert not re.search(r"\d+ of \d+ verified", done.stdout), "a safe kernel was verified again"


def test_verify_and_record(tuned: Path) -> None:
    forward = ("--pass", "forward", "--problem", TINY)
    done = kgen("verify", "--op", "rmsnorm", "--gpu", "host", *forward, cwd=tuned)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compute rmsnorm" in done.stdout
    report = yaml.safe_load((tuned / "generated/kgen_ops/rmsnorm/reports/host.yaml").read_text())
    record = report["problems"][0]["chosen"]["record"]
    done = kgen("verify", "--op", "rmsnorm", "--gpu", "host", "--record", record, cwd=tuned)
    assert done.returncode == 0, done.stderr
    assert "1 of 1" in done.stdout
    done = kgen("verify", "--op", "rmsnorm", "--gpu", "host", "--record", "nope", cwd=tuned)
    assert done.returncode == 2
    assert "has no forward or backward record 'nope'" in done.stderr


def test_report_repeats_a_row_of_another_folder(tmp_path: Path) -> None:
    library = tmp_path / "my library"
    library.symlink_to(Path(__file__).parents[2] / "generated")
    done = kgen("report", "--op", "rmsnorm", "--gpu", "h200", "--out", library.name, "--problem",
                "M8192 N4096 bf16", cwd=tmp_path)
    assert "kgen tune --op rmsnorm --gpu h200 --out 'my library' --pass forward" in done.stdout


def test_verify_names_the_gpu_of_a_record(tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "generated"
    report = committed / "kgen_ops" / "rmsnorm" / "reports" / "h200.yaml"
    record = yaml.safe_load(report.read_text())["problems"][0]["chosen"]["record"]
    done = kgen("verify", "--op", "rmsnorm", "--gpu", "host", "--record", record, "--out",
                str(committed), cwd=tmp_path)
    assert done.returncode == 2
    assert "h200.trials.jsonl has it; add --gpu h200" in done.stderr


def records_of(folder: Path, problem: str) -> list[str]:
    """The journal's whole lines of a problem."""
    journal = folder / JOURNAL
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [line for line in lines if line.endswith("}") and f'"{problem},' in line]


def tune_until_two_trials(folder: Path) -> subprocess.Popen[str]:
    """Start a long tune in a process group of its own; return once two trials are written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kgen", *tune_arguments(OTHER, trials=200)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len(records_of(folder, OTHER)) >= 2:
            break
        time.sleep(0.05)
    return process


def test_sigint_keeps_what_was_found(tmp_path: Path) -> None:
    process = tune_until_two_trials(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "resumes" in errors
    assert "Traceback" not in errors
    assert len(records_of(tmp_path, OTHER)) >= 2


def test_a_killed_tune_resumes(copied: Path) -> None:
    process = tune_until_two_trials(copied)
    process.kill()
    process.communicate(timeout=120)
    before = (copied / JOURNAL).read_text().splitlines()
    whole = len([line for line in before if line.endswith("}")])
    known = len(records_of(copied, OTHER))
    assert known >= 2
    done = tune(copied, trials=known + 2, problem=OTHER)
    assert done.returncode == 0, done.stderr
    assert f"trial {known + 2}/{known + 2}" in done.stdout
    after = (copied / JOURNAL).read_text().splitlines()
    assert after[:whole] == before[:whole], "what was written stays"
    report = load_report(copied / "generated/kgen_ops/rmsnorm/reports/host.yaml")
    [_, count] = [p.trials.count for p in report.problems]
    assert [p.problem.startswith(f"{OTHER},") for p in report.problems] == [False, True]
    assert count == known + 2


MISTAKES = [
    (["tune", "--op", "rmsnrom"], "did you mean 'rmsnorm'"),
    (["tune", "--op", "rmsnorm", "--gpu", "h20"], "did you mean 'h200'"),
    (
        ["tune", "--op", "softmax", "--path", SOFTMAX, "--gpu", "host", "--pass", "backward"],
        "unknown pass",
    ),
    (
        ["tune", "--op", "rmsnorm", "--gpu", "host", "--problem", "M=1,K=2,dtype=fp32"],
        "unknown name 'K'",
    ),
    (
        ["tune", "--op", "rmsnorm", "--gpu", "host", "--problem", "M=1,N=2,dtype=fp31"],
        "unknown dtype 'fp31' for 'dtype'\n  did you mean 'fp32'? known: bf16, fp16, fp32\n",
    ),
    (
        ["tune", "--op", "rmsnorm", "--gpu", "host", "--problem", TINY, "--problem", TINY],
        "given twice",
    ),
    (["tune", "--op", "rmsnorm", "--trials", "0"], "not a whole number"),
    (["tune", "--op", "rmsnorm", "--time", "soon"], "is not a duration"),
    (["tune", "--op", "rmsnorm", "--compile-timeout", "0"], "is not a duration"),
    (["verify", "--op", "rmsnorm", "--compile-memory", "8"], "is not a memory size"),
    (["tune", "--op", "rmsnorm", "--path", "nowhere"], "is not a folder"),
    (["emit", "--learn-rankings", "rmsnorm"], "there is no library in generated"),
    (["verify", "--op", "rmsnorm", "--array", "3"], "add --library"),
    (["verify", "--op", "rmsnorm", "--record", "d7e04025", "--problem", TINY],
     "leave out --problem"),
    (["tune"], "--op"),
    (["frobnicate"], "invalid choice"),
    (["Tnue", "--op", "rmsnorm"], "did you mean tune?\n  next: kgen --help"),
    (["tune", "--op", "rmsnorm", "--tirals", "3"],
     "unrecognized arguments: --tirals 3\n  did you mean --trials instead of --tirals?\n"),
    (["explain", "--op", "rmsnorm", "--porblem=M=8"], "did you mean --problem instead of"),
    (["report", "--nosuch"], "unrecognized arguments: --nosuch\n  next: kgen report --help"),
    (["tune", "--calls", "none.yaml"], "No such file or directory\n  next: check the path"),
    (["tune", "--population", "./none.yaml"], "No such file or directory\n  next: check the"),
    (["report"], "kgen tune writes them"),
    (["report", "--html", ""], "'' is empty"),
    (["tune", "--op", ""], "'' is empty"),
    (["report", "--csv", "--svg", "a.svg"], "--csv prints, --svg writes instead"),
    (["report", "--against", "a.yaml", "--markdown", "a.md"], "--against prints, --markdown"),
    (["report", "--html", "a", "--svg", "./a"], "each needs a file of its own"),
    (["package", "--wheel", "dist", "--arch", "sm_1"], "'sm_1' is not an architecture"),
    (["ops", "--path", "."], "has neither operators/ nor search_spaces/"),
    (["explain", "--op", "rmsnorm", "--problem", f"M={'9' * 400},N=1,dtype=fp32"],
     "is not a whole number"),
]


@pytest.mark.parametrize(
    ("arguments", "part"), MISTAKES, ids=[" ".join(a)[:60] for a, _ in MISTAKES]
)
def test_mistakes_are_one_paragraph(tmp_path: Path, arguments: list[str], part: str) -> None:
    done = kgen(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "generated").exists(), "something was written for a mistake"


@pytest.mark.parametrize(("function", "said"), [
    ("lambda *_: sys.exit(0)", "a function of the operator's module called sys.exit(0)"),
    ("lambda *_: os._exit(0)", "a function of the operator's module called sys.exit(0)"),
    ("os._exit(0)", "the operator module does not load\n  SystemExit: 0"),
    ("lambda _, problem: problem.dim('Q')", "has no dim 'Q'"),
])
def test_a_faulty_function_of_an_operator_is_no_success(
    tmp_path: Path, function: str, said: str
) -> None:
    mine = shutil.copytree(SOFTMAX, tmp_path / "mine")
    with (mine / "operators" / "softmax.py").open("a") as module:
        module.write(f"\nimport dataclasses, os, sys\n"
                     f"OPERATOR = dataclasses.replace(OPERATOR, cost={function})\n")
    done = kgen("tune", "--op", "softmax", "--path", "mine", "--gpu", "host", "--trials", "1",
                "--no-peers", cwd=tmp_path)
    assert done.returncode in (1, 2), done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reproduce_line_works_when_pasted(tmp_path: Path) -> None:
    mine = shutil.copytree(SOFTMAX, tmp_path / "my operators")
    (template,) = (mine / "templates").rglob("forward_*.cu.jinja")
    text = template.read_text()
    assert "/ sum" in text
    template.write_text(text.replace("/ sum", "/ (2.0f * sum)"))
    done = kgen("tune", "--op", "softmax", "--path", "my operators", "--gpu", "host", "--problem",
                "M=9,N=64,dtype=fp32", "--trials", "2", "--no-peers", "--out", "my library",
                cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1, done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "reproduce: " in line]
    program, *arguments = shlex.split(line.partition("reproduce: ")[2])
    assert program == "kgen"
    again = kgen(*arguments, cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert "elements of y out of bound" in again.stdout
    assert "0 of 1 kernels compute softmax" in again.stdout


def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    done = kgen("verify", "--op", "rmsnorm", "--gpu", "a100", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "no NVIDIA A100" in done.stderr
    assert "--gpu host works" in done.stderr


def test_no_compiler(tmp_path: Path) -> None:
    env = {"CXX": "no-such-compiler"}
    done = kgen("tune", "--op", "rmsnorm", "--gpu", "host", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    assert "no-such-compiler" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    done = tune(tmp_path, "--out", "locked/lib")
    assert done.returncode == 1
    assert "cannot be made" in done.stderr


def test_output_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = tune(tmp_path, "--out", "file")
    assert done.returncode == 1
    assert "--out DIR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("redirection", "code", "said"), [
    (">&-", 0, ""),
    ("2>&-", 0, ""),
    ("<&- >&- 2>&-", 0, ""),
    pytest.param(
        ">/dev/full", 1, "kgen: No space left on device\n  check permissions and free space\n",
        marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full"),
    ),
    ("| head -c 1 >&2", 0, "n"),
])
def test_standard_output_that_is_closed_or_full(
    tmp_path: Path, redirection: str, code: int, said: str
) -> None:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m kgen gpus {redirection}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_a_full_disk(tuned: Path, tmp_path: Path) -> None:
    """A file size limit makes writes fail like a full disk. The modules are in `tuned`'s cache."""
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from kgen.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *tune_arguments(TINY, trials=2)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
