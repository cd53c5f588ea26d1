"""Next steps in the messages of mistakes that new users make."""

import os
from pathlib import Path

import pytest

from kgen.build.host import find_cxx
from kgen.catalogue import open_catalogue
from kgen.catalogue.captured_calls import load_captured_calls
from kgen.catalogue.populations import load_population
from kgen.cli.parser import build_parser
from kgen.emit.loaded_library import require_operator
from kgen.errors import (
    CapturedCallsError,
    PopulationError,
    ProblemError,
    StorageError,
    ToolchainError,
    suggest,
)
from kgen.search.storage import open_storage, parse_storage


def test_a_name_in_other_case_is_suggested() -> None:
    assert suggest("RMSNorm", ["rmsnorm", "wkv6"]).startswith("did you mean 'rmsnorm'? known:")
    assert suggest("nosuch", ["rmsnorm", "wkv6"]) == "known: rmsnorm, wkv6"


def test_an_operator_that_a_library_lacks_names_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "kgen_ops/rmsnorm/tables").mkdir(parents=True)
    (tmp_path / "kgen_ops/__init__.py").touch()
    with pytest.raises(ProblemError, match="known: rmsnorm\n  next: kgen tune or kgen emit --add"):
        require_operator(tmp_path, "wkv6")


def test_advice_for_a_sqlite_file_speaks_of_no_host(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="next: name a file that you may write, in a folder"):
        open_storage(parse_storage(f"sqlite:///{tmp_path}/missing/x.db"))


@pytest.mark.parametrize(("content", "said"), [
    (None, "cannot be read: No such file or directory\n  next: check the path"),
    ("folder", "cannot be read: Is a directory\n  next: name a file, not a folder"),
    (b"\xff\xfe", "next: name a text file in UTF-8"),
    (b"a: [1", "not valid YAML: .*\n  next: mend the file there"),
    (b"", "the file is empty\n  next: mend the file there"),
    (b"a: 1", "\n  next: "),
])
def test_files_that_are_none_name_the_next_step(
    tmp_path: Path, content: bytes | str | None, said: str
) -> None:
    file = tmp_path / "x.yaml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    with pytest.raises(CapturedCallsError, match=said):
        load_captured_calls(file, open_catalogue())
    with pytest.raises(PopulationError, match=said):
        load_population(str(file), open_catalogue())


def test_an_unknown_option_is_looked_for_in_its_command(
    capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["tune", "--seed", "3", "--TRIALS=3", "--nothing-like-it"])
    said = capsys.readouterr().err
    assert "kgen tune: error: unrecognized arguments: --TRIALS=3 --nothing-like-it\n" in said
    assert said.count("did you mean") == 1
    assert "  did you mean --trials instead of --TRIALS?\n  next: kgen tune --help" in said
    assert build_parser().parse_args(["tune", "--popul", "x"]).population == "x"  # a prefix


@pytest.mark.parametrize(("value", "step"), [
    ("nosuch", "next: unset CXX, or set it to g\\+\\+"),
    ("sh -c", "next: set CXX=sh, without options"),
    (os.devnull, "CXX=/dev/null names no program"),
])
def test_a_compiler_that_is_none(
    monkeypatch: pytest.MonkeyPatch, value: str, step: str
) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(ToolchainError, match=step):
        find_cxx()


def test_a_compiler_that_fails_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kgen.build.host import _version

    program = tmp_path / "cxx"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(ToolchainError, match=r"(?s)CXX=.*exit status 3.*broken\n  next: unset CXX"):
        _version(str(program))
