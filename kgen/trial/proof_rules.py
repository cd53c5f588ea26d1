"""The digest of the verifier's code: certificates of an older verifier are not reused.

It covers the text of the modules that choose the input sets, evaluate the oracle, launch, compare
and decide, without comments and docstrings. So no version number needs to be raised by hand.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import kgen
from kgen.model.digest import digest_of

# Paths, because importing `kgen.check` would import torch.
_MODULES = (
    "check/*.py",
    "launch/early.py",
    "worker/proof.py",
    "worker/runner.py",
    "worker/binding.py",
    "trial/host_imports.py",
    "model/set_results.py",
    "trial/host_parts.py",
    "trial/host_runs.py",
    "trial/kept_state.py",
    "trial/told_apart.py",
    "trial/untested.py",
    "build/comparisons.py",
    "model/spread_source.py",
    "model/whole_source.py",
)

# Older verifiers whose certificates are valid as well, because they refused every kernel that the
# current one refuses. The key is the current digest, so that a later change makes them invalid.
_AS_STRICT = {
    "a0a26a191825": (
        "5030714048af",  # narrower bounds; a result used twice was judged twice
        "6736ec9f1b77",  # ended with an error where hard values cancel, which are drawn again now
    ),
}


def are_current(rules: str) -> bool:
    """Whether certificates with a digest, as `proof_rules` returned it then, are still valid."""
    return rules == proof_rules() or rules in _AS_STRICT.get(proof_rules(), ())


@cache
def proof_rules() -> str:
    """Return the digest of the modules that make up the verifier."""
    root = Path(kgen.__path__[0])
    return rules_digest(
        (str(path.relative_to(root)), path.read_text(encoding="utf-8"))
        for pattern in _MODULES
        for path in sorted(root.glob(pattern))
    )


def rules_digest(sources: Iterable[tuple[str, str]]) -> str:
    """Return the digest of modules' texts without comments, docstrings and blank lines.

    Args:
        sources: (name, text) of each module.
    """
    return digest_of([[name, list(_statements(text))] for name, text in sources])


def _statements(text: str) -> Iterator[str]:
    """The lines of a module without comments, docstrings and empty lines.

    Lines instead of the syntax tree, whose dump differs between Python versions.
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        stands_alone = not lines[first][: node.col_offset].strip() and not (
            lines[last].encode()[node.end_col_offset :].strip()
        )
        if isinstance(node.value.value, str) and stands_alone:
            lines[first : last + 1] = [""] * (last + 1 - first)
    return (line.rstrip() for line in lines if line.strip())
