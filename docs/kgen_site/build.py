"""The steps of a build."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from kgen.cli.parser import build_parser
from kgen_site import reference, results
from kgen_site.layout import REFERENCE, REPORT_PAGE
from kgen_site.staging import Staging, clean_folder

_HERE = Path(__file__).resolve().parent


def build(root: Path, out: Path) -> int:
    """Build the site of a checkout; return Sphinx's exit status, which a warning makes 1.

    Args:
        root: Of the checkout.
        out: For the pages. Beside it a folder is made for what the build needs in between.
    """
    work = out.parent / f"{out.name}-work"
    for folder in (work, out):
        clean_folder(folder)
    stage(root, work / "source")
    results.write_report(root / "generated", work / "extra")
    return run_sphinx(work, out)


def stage(root: Path, source: Path) -> None:
    """Write the folder that Sphinx reads: pages of the repository, and generated ones."""
    os.environ["COLUMNS"] = "80"  # argparse folds usages to the width of a terminal
    sys.path.insert(0, str(root / "generated"))
    library = importlib.import_module("kgen_ops")
    staging = Staging(root, source)
    staging.copy()
    pages = {
        "operators": reference.operator_page(library),
        "library": reference.library_page(library),
        "published": reference.published_page(importlib.import_module("kgen_ops.compat")),
        "own-operators": reference.own_operators_page(),
        "kgen": reference.kgen_page(),
        "commands": reference.command_page(build_parser()),
    }
    for name, text in pages.items():
        staging.write(f"{REFERENCE}/{name}.md", text)
    drawn = results.pictures(root / "generated" / "kgen_ops")
    for name, picture in drawn.items():
        staging.write(f"{results.FOLDER}/{name}.svg", picture)
    table = (source / "results.md").read_text(encoding="utf-8")
    staging.write("results.md", results.with_pictures(table, drawn))
    staging.write(f"{REPORT_PAGE}.md", results.report_page())


def run_sphinx(work: Path, out: Path) -> int:
    """Run Sphinx over `work/source`; files in `work/extra` are copied as they are."""
    from sphinx.cmd.build import build_main

    work = work.resolve()  # Sphinx takes some paths from the folder of conf.py
    return int(build_main([
        "--builder", "html", "--conf-dir", str(_HERE), "--doctree-dir", str(work / "doctrees"),
        "--fail-on-warning", "--quiet", "-D", f"html_extra_path={work / 'extra'}",
        str(work / "source"), str(out),
    ]))
