"""TAB completion in real shells, and the words that are offered after each option."""

from __future__ import annotations

import argparse
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kgen.cli.completers import COMPLETERS, attach, valued
from kgen.cli.parser import build_parser

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = ROOT / "docs" / "tutorials" / "softmax"
LONGEST_S = 40.0


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with `kgen`, this checkout's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    kgen = folder / "kgen"
    kgen.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m kgen "$@"\n')
    kgen.chmod(0o755)
    return folder


def offered(line: str, **env: str) -> list[str]:
    """What kgen answers for a line whose end is the cursor, in fish's form: no line is mangled."""
    script = ("import os, sys\nos.dup2(1, 8), os.dup2(2, 9)\n"
              "from kgen.cli.main import main\nmain()")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "fish", "COMP_TYPE": "",
             "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_DFS": "\t",
             "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)), **env},
        capture_output=True, text=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return [found.partition("\t")[0] for found in done.stdout.splitlines()]


@pytest.mark.quick
def test_every_option_with_a_value_has_a_completer() -> None:
    parser = build_parser()
    attach(parser)
    used = {(command, action.dest) for command, action in valued(parser)}
    assert len(used) > 50
    for name in COMPLETERS:
        command, _, option = name.rpartition(" ")
        assert any(option == dest and command in ("", of) for of, dest in used), f"{name} is gone"


@pytest.mark.quick
def test_an_option_without_a_completer_is_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_subparsers().add_parser("made-up").add_argument("--made-up")
    with pytest.raises(KeyError, match="made_up"):
        attach(parser)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kgen rep", ["report"]),
        ("kgen tune --op wkv6", ["wkv6", "wkv6_decode"]),
        ("kgen tune --gpu h", ["h100", "h100_pcie", "h200", "host"]),
        ("kgen tune --pass b", ["backward"]),
        ("kgen tune --population rwkv_", ["rwkv_decode"]),
        ("kgen tune --trials ", []),
        ("kgen tune --op rmsnorm --problem M=8,", [
            f"M=8,{name}=" for name in ("N", "dtype", "w_dtype", "residual_dtype", "rstd_dtype")]),
        ("kgen tune --op rmsnorm --problem M=8,w_dtype=", [
            f"M=8,w_dtype={dtype}" for dtype in ("fp32", "fp16", "bf16", "none")]),
        ("kgen tune --op rmsnorm --problem M=819", ["M=8191", "M=8192"]),
        ("kgen tune --op nothing --problem M", []),
        ("kgen tune --problem M", []),
        ("kgen package --arch sm_80,sm_8", ["sm_80,sm_86", "sm_80,sm_89"]),
        ("kgen emit --add rmsnorm,timex,t", []),
        ("kgen tune --op s --path no-such-folder", []),
    ],
)
def test_what_is_offered(line: str, wanted: list[str]) -> None:
    assert offered(line) == wanted


@pytest.mark.quick
def test_operators_of_ones_own(tmp_path: Path) -> None:
    assert offered("kgen tune --op so") == []
    assert offered("kgen tune --op so", KGEN_PATH=str(SOFTMAX)) == ["softmax"]
    assert offered(f"kgen tune --path {SOFTMAX} --op so") == ["softmax"]
    assert offered(f"kgen tune --path {SOFTMAX} --op softmax --problem M=4,d") == ["M=4,dtype="]
    assert offered("kgen tune --op w", KGEN_PATH=str(tmp_path / "gone")) == []


@pytest.mark.quick
def test_tab_does_not_load_torch() -> None:
    script = (
        "import sys\nfrom kgen.cli import completers\nfrom argparse import Namespace\n"
        "given = Namespace(op='rmsnorm', path=[], command='tune')\n"
        "assert list(completers.problem(given, 'M='))\n"
        "assert completers.architectures()\nassert completers.gpus(given)\n"
        "print([name for name in ('torch', 'optuna', 'numpy') if name in sys.modules])\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, env)
        self.seen = ""

    def send(self, keys: str) -> None:
        os.write(self._handle, keys.encode())

    def wait_for(self, *parts: str) -> None:
        """Read until all parts have been shown since the last call."""
        begin, end = len(self.seen), time.monotonic() + LONGEST_S
        while not all(part in self.seen[begin:] for part in parts):
            assert time.monotonic() < end, f"no {parts} in:\n{self.seen[begin:]}"
            if select.select([self._handle], [], [], 1.0)[0]:
                self.seen += os.read(self._handle, 65536).decode(errors="replace")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._handle)


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"],
             'PS1="rea""dy> "; eval "$(kgen completion bash)"'),
    "zsh": (["zsh", "-f", "-i"],
            'PS1="rea""dy> "; autoload -U compinit; compinit -D -u; '
            'eval "$(kgen completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"],
             'function fish_prompt; echo -n rea""dy">" ; end; kgen completion fish | source'),
}


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tools: Path, tmp_path: Path
) -> Iterator[Terminal]:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name} on PATH")
    command, load = SHELLS[name]
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "TERM": "xterm",
           "HOME": str(tmp_path), "KGEN_PATH": str(SOFTMAX), "LC_ALL": "C.UTF-8"}
    terminal = Terminal(command, env)
    try:
        # The terminal echoes the command; the quotes in the command tell its echo from the prompt.
        terminal.send(f"{load}\r")
        terminal.wait_for("ready>")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("kgen tune --op wkv\t\t", ("wkv4", "wkv5", "wkv6", "wkv7")),
        ("kgen tune --op sof\t", ("softmax",)),
        ("kgen tune --op rmsnorm --problem M=8,w_d\t", ("w_dtype=",)),
    ],
)
def test_tab(shell: Terminal, keys: str, shown: tuple[str, ...]) -> None:
    shell.send(keys)
    shell.wait_for(*shown)
