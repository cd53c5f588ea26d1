"""Copy the repository's Markdown into the folder that Sphinx reads, with the links of the site.

On the forge a link leads to a file of the repository. On the site it leads to the page of that
file; a source file or a folder that a page names becomes a page with its text.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

from kgen_site import layout

_LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?(?=\))")
_FENCE = re.compile(r"(?P<fence>```+|~~~+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".jinja": "cuda", ".toml": "toml"}
_IMAGES = (".svg", ".png")


class Staging:
    """The pages that come from files of the repository.

    Attributes:
        root: Of the repository.
        out: The folder that Sphinx reads.
    """

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        self._sources: set[str] = set()

    def copy(self) -> None:
        """Write all pages, and those of the sources that they name."""
        for file in layout.markdown_files(self.root):
            page = layout.page_of(file)
            assert page is not None
            text = self._with_links((self.root / file).read_text(encoding="utf-8"), file, page)
            if page == "index.md":
                text += layout.navigation()
            elif page == "decisions/index.md":
                text += layout.list_of(self._decisions())
            elif page == "device-library.md":
                text = with_index_entries(text)
            self.write(page, text)
        self._write_sources()

    def write(self, page: str, text: str) -> None:
        """Write a page, a picture or another file for the site."""
        path = self.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _decisions(self) -> list[str]:
        folder = self.root / "docs" / "decisions"
        return sorted(path.stem for path in folder.glob("[0-9]*.md"))

    def _with_links(self, text: str, file: str, page: str) -> str:
        """Rewrite the links outside of code."""
        lines, fence = [], ""
        for line in text.splitlines(keepends=True):
            marker = _FENCE.match(line.lstrip())
            if marker and (not fence or line.lstrip().startswith(fence)):
                fence = "" if fence else marker["fence"]
            lines.append(line if fence else _LINK.sub(
                lambda match: self._link(match, file, page), line))
        return "".join(lines)

    def _link(self, match: re.Match[str], file: str, page: str) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if ":" in target:
            return match[0]
        named = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        path = self.root / named
        if not path.exists():
            return match[0]  # not a link, or a dead one: Sphinx tells
        there = layout.page_of(named)
        if there is None and path.suffix in _IMAGES:
            there = named.removeprefix("docs/")
            (self.out / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.out / there)
        elif there is None:
            self._sources.add(named)
            there = f"{layout.SOURCES}/{named}.md"
        return posixpath.relpath(there, posixpath.dirname(page) or ".") + anchor

    def _write_sources(self) -> None:
        """Write a page for each source file or folder that some page names."""
        for named in sorted(self._sources):
            path = self.root / named
            text = f"# {named}\n\n"
            if path.is_dir():
                files = sorted(f for f in path.rglob("*") if f.is_file()
                               and "__pycache__" not in f.parts)
                for file in files:
                    text += f"## {file.relative_to(path).as_posix()}\n\n{_listing(file)}"
            else:
                text += _listing(path)
            self.write(f"{layout.SOURCES}/{named}.md", text)
        self.write(
            f"{layout.SOURCES}/index.md",
            "# Source files\n\nThe source files that pages of this site name.\n\n"
            + "".join(f"- [{named}]({named}.md)\n" for named in sorted(self._sources))
            + layout.list_of(sorted(self._sources)),
        )


def with_index_entries(text: str) -> str:
    """Put the names of `kgen::` declarations into the index, so that the search leads to each."""
    return re.sub(r"^```cpp\n(?P<code>.*?)^```$", _indexed, text, flags=re.MULTILINE | re.DOTALL)


def _indexed(match: re.Match[str]) -> str:
    entries = ", ".join(f"kgen::{name}" for name in declared_names(match["code"]))
    return (f"```{{index}} {entries}\n```\n\n" if entries else "") + match[0]


def declared_names(code: str) -> list[str]:
    """The names that a block of C++ declarations declares, each once."""
    code = re.sub(r"template <[^{;]*?>\n", "", code)
    code = re.sub(r"alignas\((?:[^()]|\([^()]*\))*\) ", "", code)
    found = []
    for line in code.splitlines():
        if line.startswith((" ", "}")):
            continue
        name = re.match(r"(?:struct|class|enum class|using) (\w+)", line) or re.search(
            r"(operator\S+?|\w+)(?=\()|(\w+)(?= =)", line)
        if name:
            found.append(name[1] or name[2])
    return list(dict.fromkeys(found))


def _listing(file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n\n"


def clean_folder(folder: Path) -> None:
    """Make an empty folder in place of an earlier one."""
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
