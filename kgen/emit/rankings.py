"""Write the models that rank configs into a library, one module per operator and GPU.

Operators of a family learn from the same searches. Where their models are equal, the first operator
has the model, and the modules of the others name it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from kgen.emit.common_files import list_file
from kgen.emit.files import locked, write_all
from kgen.emit.published import PACKAGE
from kgen.runtime.ranking import Ranking
from kgen.runtime.rows import FORMAT

_HEAD = '''\
"""How configs of `{operator}` rank on {gpu}, learnt from recorded searches.

Written by kgen emit --learn-rankings; do not edit.
"""

from .._runtime.ranking import Ranking, Tree, Winner

# Version of the interface between this file and the runtime.
FORMAT = {format}
'''
_SAME = '''\
"""How configs of `{operator}` rank on {gpu}: by the same model as those of `{other}`.

Written by kgen emit --learn-rankings; do not edit.
"""

# Version of the interface between this file and the runtime.
FORMAT = {format}

SAME_AS = "{other}"
'''
_COLUMNS = 100


def write_rankings(
    out_dir: str | Path, found: Mapping[str, Mapping[str, Mapping[str, Ranking]]]
) -> tuple[str, ...]:
    """Write models into a library.

    Args:
        out_dir: The library's folder.
        found: The models by operator, GPU and pass.
    Returns:
        The files that were changed.
    Raises:
        StorageError: If a file cannot be written.
    """
    root = Path(out_dir)
    files: dict[str, bytes] = {}
    owners: dict[tuple[str, tuple[tuple[str, Ranking], ...]], str] = {}
    for operator, gpus in sorted(found.items()):
        for gpu, passes in gpus.items():
            owner = owners.setdefault((gpu, tuple(passes.items())), operator)
            text = (ranking_module(operator, gpu, passes) if owner == operator
                    else _SAME.format(operator=operator, gpu=gpu, other=owner, format=FORMAT))
            files[f"{PACKAGE}/{operator}/ranking_{gpu}.py"] = text.encode()
    with locked(root):
        changed = write_all(root, files)
        return tuple(changed + write_all(root, list_file(root, {})))


def ranking_module(operator: str, gpu: str, passes: Mapping[str, Ranking]) -> str:
    """Return the text of a module; equal models give equal text."""
    text = _HEAD.format(operator=operator, gpu=gpu, format=FORMAT)
    for name, ranking in passes.items():
        trees = "".join(
            "    Tree(\n" + "".join(_tuple(part) for part in tree) + "    ),\n"
            for tree in ranking.trees
        )
        winners = "".join(
            f'    Winner(\n        "{one.operator}",\n{_string(one.config)}'
            f"{_tuple(one.dims)}{_tuple(one.dtypes)}    ),\n"
            for one in ranking.winners
        )
        text += (f"\n{name.upper()} = Ranking({ranking.problems}, {ranking.base!r}, (\n{trees}), "
                 f"(\n{winners}))\n")
    return text


def _tuple(values: Iterable[str | float]) -> str:
    said = "".join(f'"{value}", ' if isinstance(value, str) else f"{_short(value)}, "
                   for value in values)
    return textwrap.fill(f"({said.rstrip()}),", _COLUMNS, initial_indent=" " * 8,
                         subsequent_indent=" " * 9, break_long_words=False,
                         break_on_hyphens=False) + "\n"


def _string(text: str) -> str:
    """A string as adjacent literals, one per line."""
    lines = textwrap.wrap(text, _COLUMNS - 12, break_long_words=False, break_on_hyphens=False)
    return "".join(f'        "{line} "\n' for line in lines[:-1]) + f'        "{lines[-1]}",\n'


def _short(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
