"""Report files: read, written whole, merged by problem."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from kgen.errors import RecordError, StorageError, why_unreadable
from kgen.report.codec import decode, encode
from kgen.report.model import ProblemReport, Report


def load_report(path: str | Path) -> Report:
    """Read and check a report.

    Raises:
        RecordError: If there is no such file, or it deviates from the schema; the text names line
            and key.
    """
    return decode(read_document(path, "no such report; kgen tune writes it"), str(path))


def read_document(path: str | Path, missing: str) -> str:
    """Return the text of a document.

    Args:
        path: The path of the document.
        missing: The message if there is no such file.
    Raises:
        RecordError: If there is no such file or it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecordError(f"{path}: {missing}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: cannot be read: {why_unreadable(problem)}") from None


def write_report(path: str | Path, report: Report) -> None:
    """Write a report whole.

    Raises:
        StorageError: If it cannot be written.
    """
    write_whole(path, encode(report))


def write_whole(path: str | Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old or the new content.

    A symbolic link stays a link. A path that is no regular file (`/dev/stdout`, a pipe) is written
    to directly.

    Raises:
        StorageError: If it cannot be written.
    """
    target = Path(path)
    temporary = None
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_text(text, encoding="utf-8")
            return
        target = target.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".kgen-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as problem:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StorageError(f"cannot write {target}: {problem.strerror or problem}\n"
                           "  the file is unchanged; free space or fix the permissions, and "
                           "run again") from None


def update_report(path: str | Path, report: Report) -> Report:
    """Merge a report into the file and return the merged report.

    The file is locked, so two tunes of one operator and GPU may end at the same time.

    Raises:
        RecordError: If the existing file deviates from the schema, or is of another operator or
            GPU.
        StorageError: If it cannot be written.
    """
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as problem:
        raise StorageError(f"cannot write to {folder}: {problem.strerror or problem}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Path(path).exists():
            report = merge_reports(load_report(path), report)
        write_report(path, report)
    finally:
        os.close(lock)
    return report


def merge_reports(old: Report, new: Report) -> Report:
    """Return all problems of both reports; a problem in both has its new entry.

    Raises:
        RecordError: If they are of different operators or GPUs.
    """
    if (old.operator, old.gpu) != (new.operator, new.gpu):
        raise RecordError(f"cannot merge a report of {new.operator} on {new.gpu} into one of "
                          f"{old.operator} on {old.gpu}")
    merged: dict[tuple[str, str], ProblemReport] = {
        (p.pass_name, p.problem): p for p in (*old.problems, *new.problems)
    }
    problems = tuple(merged[key] for key in sorted(merged, key=_order))
    used = {p.environment for p in problems}
    known = {**old.environments, **new.environments}
    return Report(
        operator=new.operator, gpu=new.gpu, problems=problems,
        environments={name: known[name] for name in sorted(used) if name in known},
    )


def _order(key: tuple[str, str]) -> tuple[bool, str, list[tuple[str, int, str]]]:
    """Sort key: forward before backward, then problems, with extents ordered as numbers."""
    pass_name, problem = key
    parts = [part.partition("=")[::2] for part in problem.split(",")]
    return (
        pass_name != "forward", pass_name,
        [(name, int(v), "") if v.isdecimal() else (name, 0, v) for name, v in parts],
    )
