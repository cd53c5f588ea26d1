"""The parts of the built site that tests read: links, what a page loads, the text of an entry."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Attributes whose address a browser loads with the page; it loads a link of `a` only at a click.
_LOADED = {
    ("audio", "src"), ("embed", "src"), ("iframe", "src"), ("image", "href"), ("img", "src"),
    ("img", "srcset"), ("input", "src"), ("link", "href"), ("object", "data"), ("script", "src"),
    ("source", "src"), ("source", "srcset"), ("track", "src"), ("use", "href"), ("video", "poster"),
    ("video", "src"),
}
_IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page(HTMLParser):
    """A page of the site.

    Attributes:
        links: Addresses of the page's `a` elements.
        loaded: Addresses that a browser loads with the page.
        ids: Anchors of the page.
    """

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        text = self.path.read_text(encoding="utf-8")
        self.feed(text)
        for style in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL):
            self.loaded += in_style(style)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.ids.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)
            elif (tag, name.removeprefix("xlink:")) in _LOADED:
                self.loaded.append(value)
            elif name == "style":
                self.loaded += in_style(value)


def in_style(text: str) -> list[str]:
    """Addresses that a style sheet loads."""
    return [first or second for first, second in _IN_STYLE.findall(text)]


def entry(page: Path, name: str) -> str:
    """The text of a page from the anchor `name` to the next entry of the same kind."""
    text = page.read_text(encoding="utf-8")
    start = text.index(f'id="{name}"')
    following = re.compile(r'<dt class="sig|<section').search(text, start + 1)
    shown = text[text.rindex("<", 0, start) : following.start() if following else len(text)]
    return html.unescape(re.sub(r"<[^>]+>", "", shown))


def search_index(site: Path) -> dict[str, Any]:
    """The index that the search of the site reads."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    parsed: dict[str, Any] = json.loads(
        text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    return parsed


def found_by(index: dict[str, Any], word: str) -> Iterator[str]:
    """Pages whose text contains a word, which must equal its stem."""
    pages = index["terms"][word]
    for number in [pages] if isinstance(pages, int) else pages:
        yield index["docnames"][number]
