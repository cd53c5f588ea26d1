"""Which file of the repository is which page of the site, and where it stands in the navigation.

A page that is in no list below, and a list that names no page, is a warning of Sphinx and so fails
the build.
"""

from __future__ import annotations

from pathlib import Path

# Pages outside docs/; docs/x.md is x.md on the site.
_OTHER = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md",
          "CHANGELOG.md": "changelog.md"}
_INDEX = {"docs/decisions/README.md": "decisions/index.md"}
# What Git does not have as a page: written by the modules of this folder.
REFERENCE = "reference"
REPORT_PAGE = "report"
SOURCES = "sources"

# caption -> pages in order
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Tutorials": (
        "tutorials/first-tune", "tutorials/new-operator", "tutorials/training-blocks",
        "tutorials/decoding",
    ),
    "Results": ("results", REPORT_PAGE, "coverage"),
    "Reference": (
        f"{REFERENCE}/operators", f"{REFERENCE}/library", "compat", f"{REFERENCE}/published",
        f"{REFERENCE}/commands", "search-spaces", f"{REFERENCE}/own-operators",
        "device-library", f"{REFERENCE}/kgen",
    ),
    "How it works": (
        "architecture", "verification", "measurement", "bench", "joint-tunes", "report-format",
        "journal-format", "decisions/index",
    ),
    "Project": ("contributing", "releasing", "changelog", f"{SOURCES}/index"),
}


def markdown_files(root: Path) -> list[str]:
    """The Markdown files of the repository that are pages, relative to its root."""
    below = sorted(path.relative_to(root).as_posix() for path in (root / "docs").rglob("*.md"))
    return [*_OTHER, *below]


def page_of(file: str) -> str | None:
    """The page of a file of the repository; None if it is none.

    Args:
        file: Its path from the root, with `/`.
    """
    if file in _OTHER:
        return _OTHER[file]
    if not (file.startswith("docs/") and file.endswith(".md")):
        return None
    return _INDEX.get(file, file.removeprefix("docs/"))


def navigation() -> str:
    """The navigation, for the end of the front page."""
    return "\n".join(_toctree(pages, caption) for caption, pages in NAVIGATION.items())


def list_of(pages: list[str]) -> str:
    """The navigation below a page.

    Args:
        pages: Relative to the folder of the page.
    """
    return _toctree(pages, "")


def _toctree(pages: tuple[str, ...] | list[str], caption: str) -> str:
    head = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *head, "", *pages, "```", ""])
