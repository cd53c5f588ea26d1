"""The documentation site as `make docs` builds it: whole, strict, searchable, without a network."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from devtools import NoContextError, find_chromium, open_page
from devtools import Page as Tab
from site_pages import Page, entry, found_by, in_style, search_index

from kgen.catalogue import open_catalogue
from kgen.cli.parser import build_parser
from kgen.report import load_report
from kgen.search.lock import FileLock

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "generated" / "kgen_ops"
CHROMIUM = find_chromium()
PACKAGES = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}; pip install -e '.[docs]'"),
    pytest.mark.skipif(not LIBRARY.is_dir(), reason="no committed library"),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Processes of pytest-xdist share one build."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    lock, told = FileLock(str(folder / "site")), folder / "site-told.txt"
    lock.acquire()
    try:
        if not told.exists():
            paths = os.pathsep.join([str(ROOT / "docs"), str(ROOT)])
            run = subprocess.run(
                [sys.executable, "-m", "kgen_site", "--out", str(folder / "site")], cwd=folder,
                env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
            )
            told.write_text(f"{run.returncode}\n{run.stderr}")
    finally:
        lock.release()
    assert told.read_text() == "0\n"  # and no warning
    return folder / "site"


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    """All pages, by their path without `.html`."""
    return {
        str(path.relative_to(site).with_suffix("")): Page(path) for path in site.rglob("*.html")
    }


def exported(module: Path) -> list[str]:
    """`__all__`."""
    parsed = ast.parse(module.read_text())
    value = next(node.value for node in parsed.body if isinstance(node, ast.Assign)
                 and ast.unparse(node.targets[0]) == "__all__")
    return list(ast.literal_eval(value))


def test_every_page_is_in_the_navigation(pages: dict[str, Page], site: Path) -> None:
    reached = {link.partition("#")[0] for link in pages["index"].links}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        name = "decisions/index.html" if name == "decisions/README.html" else name
        assert name in reached
    for name in ("contributing", "changelog", "report", "reference/commands"):
        assert f"{name}.html" in reached


def test_every_link_leads_to_a_page_and_an_anchor(pages: dict[str, Page], site: Path) -> None:
    dead = []
    for name, page in pages.items():
        if name == "kgen-report":  # its own script makes its anchors
            continue
        for link in [*page.links, *page.loaded]:
            address, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            path = (page.path.parent / address.partition("?")[0]) if address else page.path
            there = pages.get(str(path.resolve().relative_to(site.resolve()).with_suffix("")))
            if not path.is_file() or (anchor and there and anchor not in there.ids):
                dead.append(f"{name}: {link}")
    assert not dead


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Page], site: Path) -> None:
    foreign = re.compile(r"(?!data:)[a-zA-Z]+:|//")
    loaded = [(name, address) for name, page in pages.items() for address in page.loaded]
    loaded += [(style.name, address) for style in site.rglob("*.css")
               for address in in_style(style.read_text())]
    assert len(loaded) > 5 * len(pages)  # scripts and styles were seen
    assert [(name, address) for name, address in loaded if foreign.match(address)] == []


@pytest.mark.parametrize("name", exported(LIBRARY / "__init__.py"))
def test_what_the_library_exports_is_described(site: Path, name: str) -> None:
    operator = name.removesuffix("_backward")
    is_operator = (LIBRARY / operator / "safe.py").is_file()
    page = site / "reference" / ("operators.html" if is_operator else "library.html")
    text = entry(page, f"kgen_ops.{name}")
    assert len(text.split()) > 5
    if not is_operator:
        return
    lines = open_catalogue().operator(operator).doc.splitlines()
    formulas = [line for line in lines if re.match(r"[\w'{}-]+(\[[^]]*\])? = ", line)]
    assert len(formulas) >= 2
    assert set(formulas) <= set(text.splitlines())  # each on a line of its own
    assert all(line in text for line in lines if " = " in line and line.endswith(":"))
    declared = open_catalogue().operator(operator).signature.pass_named(
        "backward" if name != operator else "forward")
    for tensor in declared.inputs:
        assert re.search(rf"\b{tensor.name}: Tensor", text)  # signature
        assert re.search(rf"^{tensor.name}: \[", text, re.M)  # parameters
    assert re.search(r"→ (Tensor|tuple\[Tensor|\w+Result)", text)  # of the stub
    assert "Source:" in text


@pytest.mark.parametrize("name", exported(LIBRARY / "compat" / "__init__.py"))
def test_published_functions_are_described(site: Path, name: str) -> None:
    text = entry(site / "reference" / "published.html", f"kgen_ops.compat.{name}")
    assert len(text.split()) > 5
    assert f"{name}(" in text or f"class {name}" in text


def test_every_command_has_its_options(site: Path) -> None:
    usage = build_parser().format_help().partition("COMMAND\n")[2]
    commands = re.findall(r"^    (\S+)\s", usage, re.M)
    assert len(commands) >= 17
    for command in commands:
        text = entry(site / "reference" / "commands.html", f"kgen-{command}")
        assert f"usage: kgen {command}" in text
        assert f"kgen {command}" in text.partition("usage:")[2]
    tune = (site / "reference" / "commands.html").read_text()
    for option in ("tune-op", "tune-trials", "report-html", "new-op-arg-NAME", "explain-problem"):
        assert f'id="cmdoption-kgen-{option}"' in tune


def test_results_have_pictures(site: Path) -> None:
    text = (site / "results.html").read_text()
    for file in sorted(LIBRARY.glob("*/reports/h200.yaml")):
        report = load_report(file)
        operator = report.operator
        for name, problems in Counter(problem.pass_name for problem in report.problems).items():
            image = f"_images/{operator}-h200-{name}.svg"
            assert f'src="{image}"' in text
            picture = (site / image).read_text()
            assert picture.count("<g>") == problems
            assert "prefers-color-scheme: dark" in picture


def test_the_search_index_has_kernels_and_commands(site: Path) -> None:
    index = search_index(site)
    assert "decisions/0012-chunk-loops" in set(found_by(index, "chunk_loop"))
    titles = [index["docnames"][number] for number, _ in index["alltitles"]["kgen tune"]]
    assert titles == ["reference/commands"]
    assert "kgen::wgmma_fence" in index["indexentries"]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("no chromium; apt-get install chromium")
    with open_page(CHROMIUM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


LOADED = "document.readyState === 'complete'"


def test_the_search_works_from_a_disk(tab: Tab, site: Path) -> None:
    tab.open(site / "index.html", LOADED)
    tab.evaluate("document.querySelector('input[name=q]').focus()")
    tab.call("Input.insertText", text="chunk_loop")
    tab.key("Enter", 13, "\r")
    tab.wait("location.pathname.endsWith('search.html') && "
             "[...document.querySelectorAll('ul.search a')].some("
             "(a) => a.getAttribute('href').startsWith('decisions/0012'))")
    tab.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q=kgen+tune")
    tab.wait("[...document.querySelectorAll('ul.search a')].some("
             "(a) => a.getAttribute('href') === 'reference/commands.html#kgen-tune')")
    assert tab.errors() == []
    assert {address.partition(":")[0] for address in tab.requests()} <= {"file", "data", "about"}


def test_waiting_goes_on_in_the_next_page(tab: Tab, site: Path) -> None:
    """Under load a page may be replaced while the browser evaluates what is waited for."""
    tab.open(site / "index.html", LOADED)
    leave = "new Promise(() => location.assign('search.html'))"
    with pytest.raises(NoContextError):
        tab.evaluate(leave)
    tab.open(site / "index.html", LOADED)
    tab.wait(f"location.pathname.endsWith('search.html') || {leave}")
    with pytest.raises(TimeoutError, match=r"location\.pathname === ''"):
        tab.wait("location.pathname === ''", seconds=0.1)


@pytest.mark.parametrize("name", ["index", "results", "report", "reference/operators"])
def test_pages_open_without_a_fault(tab: Tab, site: Path, name: str) -> None:
    tab.events.clear()
    tab.open(site / f"{name}.html", LOADED)
    assert tab.errors() == []
    assert {address.partition(":")[0] for address in tab.requests()} <= {"file", "data", "about"}
    assert tab.evaluate("[...document.images].every((image) => image.naturalWidth > 0)")


def _dead_link(source: Path) -> None:
    (source / "index.md").write_text("# A\n[b](none.md)\n")


def _dead_anchor(source: Path) -> None:
    (source / "index.md").write_text("# A\n[b](#none)\n")


def _dead_picture(source: Path) -> None:
    (source / "index.md").write_text("# A\n![b](none.svg)\n")


def _page_that_nothing_lists(source: Path) -> None:
    (source / "b.md").write_text("# B\n")


def _function_that_is_gone(source: Path) -> None:
    (source / "index.md").write_text(
        "# A\n\n```{eval-rst}\n.. autofunction:: kgen.errors.gone\n```\n")


def _argument_that_is_gone(source: Path) -> None:
    (source / "index.md").write_text(
        "# A\n\n```{eval-rst}\n.. autofunction:: renamed_argument.rename\n```\n")


FAULTS: dict[Callable[[Path], None], str] = {
    _dead_link: "none.md",
    _dead_anchor: "none",
    _dead_picture: "none.svg",
    _page_that_nothing_lists: "isn't included in any toctree",
    _function_that_is_gone: "gone",
    _argument_that_is_gone: "Args describes old",
}


def _run_sphinx(folder: Path) -> subprocess.CompletedProcess[str]:
    command = "import sys; from pathlib import Path; from kgen_site.build import run_sphinx; " \
        "sys.exit(run_sphinx(Path('work'), Path('out')))"
    paths = os.pathsep.join([str(ROOT / "docs"), str(ROOT), str(folder)])
    return subprocess.run([sys.executable, "-c", command], cwd=folder, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": paths})


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda f: f.__name__ if f else "none")
def test_a_fault_fails_the_build(tmp_path: Path, fault: Callable[[Path], None] | None) -> None:
    source = tmp_path / "work" / "source"
    source.mkdir(parents=True)
    (tmp_path / "work" / "extra").mkdir()
    (source / "index.md").write_text("# A\n\n[b](#a)\n")
    (tmp_path / "renamed_argument.py").write_text(
        'def rename(new):\n    """Rename.\n\n    Args:\n        old: The name.\n    """\n')
    if fault is not None:
        fault(source)
    run = _run_sphinx(tmp_path)
    if fault is None:
        assert (run.returncode, run.stderr) == (0, "")
    else:
        assert run.returncode != 0
        assert FAULTS[fault] in run.stderr
