"""Sphinx's settings for the documentation site; `docs/site/build.py` runs Sphinx."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import kgen
from kgen_site.docstrings import DocstringError, to_rst

_HERE = Path(__file__).parent
_log = logging.getLogger(__name__)

project = "kgen"
release = version = kgen.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
nitpicky = False  # types of torch and of the standard library have no pages here
root_doc = "index"

html_theme = "furo"
html_title = f"kgen {release}"
html_static_path = [str(_HERE / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
smartquotes = False  # `--out` in prose stays two dashes
# The search shows a piece of each page that it finds, and loads the page for that. Browsers
# refuse such loads to a page that was opened from a disk.
html_show_search_summary = False
pygments_style = "default"
pygments_dark_style = "github-dark"

myst_heading_anchors = 4  # as the forge names them: [layers](architecture.md#layers)

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False


@cache
def _stubs(file: Path) -> dict[str, str]:
    """What the functions of a stub return; of overloads, the last, which covers the others."""
    if not file.is_file():
        return {}
    parsed = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name: ast.unparse(node.returns)
        for node in parsed.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None] | None:
    """Take what a generated function returns from its stub, which tells it for each call."""
    if signature is not None and "<factory>" in signature:  # of a dataclass; not an expression
        return signature.replace("<factory>", "..."), returned
    if what != "function" or returned is None or not returned.endswith("Any"):
        return None
    stub = Path(inspect.getfile(obj)).with_suffix(".pyi")
    return signature, _stubs(stub).get(obj.__name__, returned)


def _docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite a docstring, in place; a malformed one is a warning, and so fails the build."""
    parameters = None
    if what in ("function", "method"):
        parameters = list(inspect.signature(obj).parameters)
    try:
        lines[:] = to_rst(lines, parameters)
    except DocstringError as error:
        _log.warning("docstring of %s: %s", name, error)


def _skipped(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of a named tuple: its `Attributes` describe them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> None:
    """Connect the hooks of autodoc."""
    app.connect("autodoc-skip-member", _skipped)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
