"""Docstrings as reStructuredText: formulas keep their lines, nothing becomes markup by accident."""

from __future__ import annotations

import inspect
import re

import pytest
from kgen_site.docstrings import DocstringError, block, inline, to_rst

DOCSTRING = '''Scale each row; see `explain`.

h = x + residual;  rstd[m] = 1 / sqrt(mean_n(h[m, n]^2) + eps)
y[m, n] = h[m, n]*rstd[m]*w_[n]

Gradients, with g = dy * w:
G_{t-1} = d_t G_t + r_t g_t^T

    print(kgen_ops.rmsnorm(x))

Args:
    x, w: [M, N]; |x| < 1, a*b*c, and a second
        line.
    eps: Added to `x`s mean.
Returns:
    y: [M, N].
    rstd: [M]; only with
        return_rstd.
Raises:
    ValueError: If eps <= 0.

Leading dims_ are flattened,
without a copy.

Source: Zhang and
Sennrich 2019.

The end.
'''


def rst(text: str) -> str:
    return "\n".join(to_rst(inspect.cleandoc(text).splitlines(), ["x", "w", "eps"]))


def test_a_formula_is_a_block_with_its_lines() -> None:
    block = (".. code-block:: text\n\n"
             "    h = x + residual;  rstd[m] = 1 / sqrt(mean_n(h[m, n]^2) + eps)\n"
             "    y[m, n] = h[m, n]*rstd[m]*w_[n]\n")
    assert block in rst(DOCSTRING)
    assert ("Gradients, with g = dy \\* w:\n\n.. code-block:: text\n\n"
            "    G_{t-1} = d_t G_t + r_t g_t^T\n") in rst(DOCSTRING)


def test_indented_lines_are_python() -> None:
    assert ".. code-block:: python\n\n    print(kgen_ops.rmsnorm(x))\n" in rst(DOCSTRING)


def test_sections_are_fields() -> None:
    text = rst(DOCSTRING)
    assert (":Parameters:\n    * **x, w**: [M, N]; \\|x\\| < 1, a\\*b\\*c, and a second line.\n"
            "    * **eps**: Added to ``x``\\ s mean.\n") in text
    assert (":Returns:\n    * **y**: [M, N].\n    * **rstd**: [M]; only with return\\_rstd.\n"
            ) in text
    assert ":raises ValueError: If eps <= 0.\n" in text
    assert ":Source: Zhang and Sennrich 2019.\n" in text


def test_prose_after_sections_is_prose() -> None:
    text = rst(DOCSTRING)
    assert "\nLeading dims\\_ are flattened, without a copy.\n" in text
    assert text.index("Leading dims") < text.index("\nThe end.\n") < text.index(":Parameters:")


def test_one_result_is_a_text() -> None:
    assert ":Returns: The output [B, T], and x: y, or None." in rst(
        "Do.\n\nReturns:\n    The output [B, T],\n    and x: y, or None.")


def test_named_results_may_have_a_text_after_them() -> None:
    text = rst("Do.\n\nReturns:\n    y: One.\n    z: Two.\n    They come as a tuple.\nRaises:\n"
               "    ValueError: If so.")
    assert (":Returns:\n    * **y**: One.\n    * **z**: Two.\n\n    They come as a tuple.\n"
            ":raises ValueError: If so.\n") in text


def test_docutils_finds_the_words_and_no_fault() -> None:
    core = pytest.importorskip("docutils.core", reason="the extra `docs` is not installed")
    html = core.publish_parts(rst(DOCSTRING).replace("code-block", "code"), writer="html",
                              settings_overrides={"halt_level": 2, "report_level": 2})["body"]
    text = re.sub(r"<[^>]+>", "", html)
    for words in ("y[m, n] = h[m, n]*rstd[m]*w_[n]", "|x| &lt; 1, a*b*c, and a second line.",
                  "xs mean.", "return_rstd."):
        assert words in text


@pytest.mark.parametrize(("text", "message"), [
    ("A.\n\nArgs:\n    y: No parameter.", "Args describes y"),
    ("A.\n\nArgs:\n    what it is", "is not 'name: text'"),
    ("A.\n\nRaises:\n", "no entries"),
    ("Raises: ValueError: If it is so.", "lines of their own"),
    ("An `open span.", "has no end"),
])
def test_malformed_docstrings_are_refused(text: str, message: str) -> None:
    with pytest.raises(DocstringError, match=message):
        rst(text)


def test_code_spans_are_literals() -> None:
    assert inline("`a*b` and _x_") == "``a*b`` and \\_x\\_"


@pytest.mark.parametrize("text", ["B. Peng 2022", "1) once", "(a) first", "- one", "* two", ".. x"])
def test_the_beginning_is_no_list(text: str) -> None:
    core = pytest.importorskip("docutils.core", reason="the extra `docs` is not installed")
    html = core.publish_parts(block(text), writer="html")["body"]
    assert html.strip() == f"<p>{text}</p>"


def test_what_is_no_mark_stays() -> None:
    assert block("The end. Next") == "The end. Next"
    assert block("`x` is") == "``x`` is"
