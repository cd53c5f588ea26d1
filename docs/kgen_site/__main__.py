"""Build the documentation site: `make docs`, or `PYTHONPATH=docs python -m kgen_site`.

Stages a copy of the repository's Markdown, writes the reference pages, and runs Sphinx. A warning,
such as a dead link or a page that is not in the navigation, fails the build.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kgen_site.build import build

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Build the site of this checkout."""
    parser = argparse.ArgumentParser(
        prog="python -m kgen_site", description="Build the documentation site.")
    parser.add_argument("--out", default="build/site", type=Path, metavar="DIR",
                        help="for the pages (default: %(default)s)")
    out = parser.parse_args().out.resolve()
    status = build(ROOT, out)
    if status == 0:
        print(f"wrote {out / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
