"""The files of a new operator: a definition, templates and a search space, ready to tune."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from pathlib import Path

from kgen.catalogue import RESERVED_NAMES
from kgen.errors import OptionError, StorageError

_FILES = Path(__file__).with_name("files")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def write_operator(name: str, folder: Path, taken: Collection[str]) -> tuple[Path, ...]:
    """Write operator `name`, which computes x * sigmoid(x) until its author changes it.

    Args:
        name: Also the name of the module, of the template folder and of the search space.
        folder: Receives operators/, templates/ and search_spaces/; made if missing. Other
            operators in it stay.
        taken: Names that other operators have.
    Returns:
        The files, definition first.
    Raises:
        OptionError: If the name is no identifier in lower case, is taken or reserved, or one of the
            files is there already; then nothing is written.
        StorageError: If a file cannot be written.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise OptionError(
            f"'{name}' cannot name an operator\n"
            "  allowed: lower-case letters, digits and _, first a letter; no Python keyword\n"
            "  example: kgen new-op swish")
    if name in taken or name in RESERVED_NAMES:
        why = (f"there is an operator '{name}' already" if name in taken
               else f"'{name}' cannot name an operator: the library needs that name")
        raise OptionError(f"{why}\n"
                          "  next: choose another name; kgen ops lists those that are taken")
    texts = {folder / path: text for path, text in _contents(name).items()}
    for path in texts:
        if path.exists():
            raise OptionError(f"{path} exists; nothing was written\n"
                              "  next: remove it, choose another name, or another --path")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}\n"
                           "  next: another --path or name, or fix the permissions") from None
    return tuple(texts)


def _contents(name: str) -> dict[str, str]:
    """Path below the folder -> text."""
    places = {
        "operator.py": f"operators/{name}.py",
        "search_space.yaml": f"search_spaces/{name}.yaml",
        "forward_vectors.cu.jinja": f"templates/{name}/forward_vectors.cu.jinja",
        "forward_naive.cu.jinja": f"templates/{name}/forward_naive.cu.jinja",
        "backward_vectors.cu.jinja": f"templates/{name}/backward_vectors.cu.jinja",
        "backward_naive.cu.jinja": f"templates/{name}/backward_naive.cu.jinja",
    }
    return {place: _filled(_FILES / f"{source}.in", name) for source, place in places.items()}


def _filled(source: Path, name: str) -> str:
    """`@PAD@` is as wide as the name: it aligns the parameters of a kernel."""
    text = source.read_text(encoding="utf-8")
    return text.replace("@NAME@", name).replace("@PAD@", " " * len(name))
