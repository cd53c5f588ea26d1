"""The steps of a tutorial: every fenced block of its Markdown, and how a test runs it.

The word after the fence says what a block is:

    ```console             lines that begin with `$ ` are commands, the others possible output
    ```console fails       the last command must end with an exit code other than 0
    ```python              a script, run with the library that was installed or tuned before
    ```python excerpt=F    lines of file F, relative to the tutorial; their indentation may differ
    ```yaml file=F         the whole of file F, relative to the folder in which commands run
    ```text                for reading only
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
TIMEOUT_S = 600

_BLOCK = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_KINDS = {
    "console", "console fails", "python", "python excerpt", "yaml file", "text",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A fenced block.

    Attributes:
        where: File and line, for messages.
        kind: One of `_KINDS`.
        file: Name after `file=` or `excerpt=`.
        text: Text between the fences.
    """

    where: str
    kind: str
    file: str
    text: str


def steps_of(document: Path) -> list[Step]:
    """Read the blocks of a Markdown file.

    Raises:
        ValueError: If a block does not say of which kind it is.
    """
    content = document.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(content):
        where = f"{document.name}:{content.count(chr(10), 0, match.start()) + 1}"
        kind, _, file = match[1].partition("=")
        if kind not in _KINDS:
            raise ValueError(f"{where}: a block of kind '{kind}'; known: {sorted(_KINDS)}")
        found.append(Step(where, kind, file, match[2]))
    return found


class Reader:
    """A reader who follows a tutorial in a folder of their own, on a machine without a GPU.

    `kgen` is that of this checkout, and `python` is this interpreter. `pip install` installs into
    the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._site = folder / ".site"
        tools = folder / ".tools"
        for made in (self._site, tools):
            made.mkdir()
        (folder / "docs").symlink_to(ROOT / "docs")
        python = f'exec "{sys.executable}"'
        offline = f'--quiet --no-deps --no-index --no-build-isolation --target "{self._site}"'
        for name, line in {
            "python": f'{python} "$@"',
            "kgen": f'{python} -m kgen "$@"',
            "pip": f'shift; {python} -m pip install {offline} "$@"',
        }.items():
            tool = tools / name
            tool.write_text(f"#!/bin/sh\n{line}\n")
            tool.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self._site), str(ROOT)]),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def follow(self, document: Path) -> None:
        """Do all steps of a tutorial in order."""
        for step in steps_of(document):
            self.do(step)

    def do(self, step: Step) -> None:
        """Do one step; an AssertionError names it."""
        if step.kind == "python excerpt":
            assert _unindented(step.text) in _unindented((TUTORIALS / step.file).read_text()), (
                f"{step.where} is no excerpt of {step.file}")
        elif step.kind == "yaml file":
            (self.folder / step.file).write_text(step.text)
        elif step.kind == "python":
            self.run(["python", "-c", step.text], step.where)
        elif step.kind.startswith("console"):
            commands = [line[2:] for line in step.text.splitlines() if line.startswith("$ ")]
            assert commands, f"{step.where} has no command"
            for number, command in enumerate(commands, 1):
                fails = step.kind == "console fails" and number == len(commands)
                self.run(["sh", "-c", command], f"{step.where}: {command}", fails)

    def run(self, command: list[str], where: str, fails: bool = False) -> str:
        """Run a command; return its output."""
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, f"{where}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"{where}\n{done.stderr}"
        return done.stdout


def python_block(document: Path, part: str, changes: Mapping[str, str]) -> str:
    """The only Python block of a document that contains `part`, with `changes` applied."""
    content = document.read_text(encoding="utf-8")
    (text,) = [m[2] for m in _BLOCK.finditer(content) if m[1] == "python" and part in m[2]]
    for old, new in changes.items():
        assert old in text, f"{document.name}: no '{old}' in its example"
        text = text.replace(old, new)
    return text


def _unindented(text: str) -> str:
    """A text without indentation, and without comments and the space before them."""
    lines = (re.sub(r"\s+# .*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
