"""The prose: pages that kgen writes are today's, every path and link exists, lengths are kept."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kgen.cli.examples import DESCRIPTIONS, EXAMPLES, FIRST
from kgen.cli.parser import build_parser
from kgen.errors import RecordError
from kgen.report import Report, draw_svg, insert_summary, load_report, print_markdown
from kgen.report.tables import BEGIN, END, problem_labels

ROOT = Path(__file__).resolve().parents[2]
REWRITE = "run: " + EXAMPLES["report"][-1][1]

PAGES = sorted([
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "benchmarks/README.md",
    *ROOT.glob("docs/**/*.md"), *(ROOT / "templates").rglob("*.md"),
])
PAGE_IDS = [str(p.relative_to(ROOT)) for p in PAGES]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
SVG = "{http://www.w3.org/2000/svg}"
README_LINES = 150
DECISION_LINES = 60
COLUMNS = 120

# Folders that pages name paths from: the root, the packages, the library, its operators, the
# device library.
FOLDERS = (
    "", "kgen/", "generated/", "generated/kgen_ops/", "generated/kgen_ops/*/", "templates/",
    "templates/include/", "templates/include/kgen/", "docs/tutorials/", "docs/tutorials/*/",
)  # fmt: skip
ENDINGS = ("py", "cuh", "jinja", "yaml", "md", "c", "svg", "toml", "txt")
# Files that a command writes, or that a reader makes.
NOT_HERE = re.compile(
    r"mine/.*|(templates/scale/)?forward_rows\.cu\.jinja|bench\.yaml|.*\.trials\.jsonl|.*optuna\.log|"
    r".*pt\.trace\.json|kgen\.json|.*host\.yaml|dist/.*"
)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return [load_report(p) for p in sorted(ROOT.glob("generated/kgen_ops/*/reports/h200.yaml"))]


def test_results_are_those_of_the_reports(reports: list[Report]) -> None:
    assert (ROOT / "docs/results.md").read_text("utf-8") == print_markdown(reports), REWRITE


def test_picture_is_that_of_the_reports(reports: list[Report]) -> None:
    picture = draw_svg(reports)
    assert (ROOT / "docs/results.svg").read_text("utf-8") == picture, REWRITE
    assert "prefers-color-scheme: dark" in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_picture_of_one_pass_has_its_legend_below_the_title(reports: list[Report]) -> None:
    def places(report: Report, name: str) -> tuple[float, float]:
        problems = tuple(p for p in report.problems if p.pass_name == name)
        picture = ElementTree.fromstring(draw_svg([replace(report, problems=problems)]))
        texts = {text.text: float(text.get("y", "nan")) for text in picture.iter(f"{SVG}text")}
        return texts["kgen"], texts[name]

    report = next(r for r in reports if r.operator == "rmsnorm")
    legend, heading = places(report, "forward")
    assert 24 + 11 < legend < heading - 11  # a line of text is 11 pixels high


def test_a_picture_may_have_rows_without_a_peer(reports: list[Report]) -> None:
    report = next(r for r in reports if r.operator == "wkv5")
    assert not any(problem.peers for problem in report.problems)
    assert "<g><title>" not in draw_svg([report])
    picture = draw_svg([report], with_unpaired=True)
    rows = picture.count("<g><title>wkv5 ")
    assert rows == len(report.problems)
    assert picture.count('<circle class="kgen"') == rows + 1  # and the legend's
    assert picture.count('<circle class="peer"') == 1
    assert picture.count(">–</text></g>") == rows


def test_readme_table_is_that_of_the_reports(reports: list[Report]) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text == insert_summary(text, reports, "README.md"), REWRITE
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    passes = {(report.operator, p.pass_name) for report in reports for p in report.problems}
    assert len(table) == 2 + len(passes) >= 2 + 11


def test_readme_is_short_and_has_both_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= README_LINES
    assert "\nmake tune " in text
    assert "\nmake test " in text


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.name)
def test_a_decision_is_one_page(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text.splitlines()) <= DECISION_LINES
    assert text.startswith(f"# {page.name[:4]} ")
    for part in ("Context", "Decision", "Evidence", "Consequences"):
        assert re.search(rf"^(\*\*|## ){part}\b", text, re.M), f"{page.name} lacks {part}"


def test_every_decision_is_listed_once() -> None:
    text = (ROOT / "docs" / "decisions" / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(\d{4})\]\((\d{4}-[\w-]+\.md)\) \|", text, re.M)
    assert sorted(name for _, name in listed) == [page.name for page in DECISIONS]
    assert all(name.startswith(number) for number, name in listed)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_prose_is_narrow(page: Path) -> None:
    long = [
        f"{number}: {line}" for number, line in prose(page)
        if len(line) >= COLUMNS and not line.startswith("|")
    ]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_cited_path_exists(page: Path) -> None:
    missing = [
        f"{number}: {path}" for number, line in prose(page) for path in paths(line)
        if not exists(path, page.parent)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for number, line in prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}:{number}: {target}"
            if anchor:
                assert anchor in anchors(file), f"{page.name}:{number}: {target}"


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of code blocks."""
    code = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


def paths(line: str) -> Iterator[str]:
    """Code spans that name a file or folder of the repository."""
    for span in re.findall(r"`([^`\s]+)`", line):
        path = span.partition(":")[0].partition("#")[0]
        if re.fullmatch(r"[\w./<>*{},-]+", path) is None or NOT_HERE.fullmatch(path):
            continue
        stem, _, ending = path.rpartition(".")
        if (stem and ending in ENDINGS) or path.endswith("/"):
            yield path


def exists(path: str, beside: Path) -> bool:
    if path.startswith("../"):
        return (beside / path).exists()
    pattern = re.sub(r"<[^>]*>", "*", path).lstrip("/").removesuffix("/")
    if "/" not in pattern:  # a bare file name: anywhere
        return any(True for _ in ROOT.glob(f"{pattern}")) or any(
            any(True for _ in (ROOT / top).rglob(pattern))
            for top in ("kgen", "templates", "generated", "docs", "tests", "search_spaces",
                        "benchmarks")
        )
    return any(any(True for _ in ROOT.glob(folder + pattern)) for folder in FOLDERS)


def anchors(file: Path) -> set[str]:
    heads = [line for _, line in prose(file) if line.startswith("#")]
    return {
        re.sub(r"[^\w\- ]", "", head.lstrip("#").strip().lower()).replace(" ", "-")
        for head in heads
    }


def test_every_command_has_an_example_that_parses() -> None:
    parser = build_parser()
    commands = next(a for a in parser._actions if a.dest == "command").choices
    assert commands is not None
    assert set(commands) == set(EXAMPLES), "add examples to kgen/cli/examples.py"
    assert set(commands) == set(DESCRIPTIONS), "describe it in kgen/cli/examples.py"
    for name in commands:
        text = commands[name].format_help()  # type: ignore[index]
        assert EXAMPLES[name]
        for _, line in EXAMPLES[name]:
            assert line in text
            words = shlex.split(line)
            assert words[:2] == ["kgen", name]
            parser.parse_args(words[1:])
    for _, line in FIRST:
        assert line in parser.format_help()
        assert line.startswith("kgen ")


def test_labels_say_what_differs() -> None:
    labels, common = problem_labels([
        "B=8,N=8,T=4,dtype=bf16,w_dtype=fp32,u_dtype=bf16,state_dtype=none,form=log",
        "B=2,N=2,T=2,dtype=fp32,w_dtype=fp32,u_dtype=fp32,state_dtype=fp32,form=log",
    ])
    assert labels == ["B=8 T=4 bf16 w fp32", "B=2 T=2 fp32 state fp32"]
    assert common == ["N = B", "form = log"]


def test_labels_show_a_dim_where_it_differs_from_the_one_that_it_mostly_equals() -> None:
    of_rows = [f"B={b},N={b},T=4,K=64,V={v}" for b, v in ((1, 64), (2, 64), (3, 128))]
    labels, common = problem_labels([*of_rows, "B=1,N=8,T=4,K=64,V=128"])
    assert labels == [
        "B=1 T=4 K=64 V=64", "B=2 T=4 K=64 V=64", "B=3 T=4 K=64 V=128", "B=1 N=8 T=4 K=64 V=128",
    ]
    assert common == ["N = B unless given"]


def test_a_page_without_a_place_for_the_table_is_refused(reports: list[Report]) -> None:
    with pytest.raises(RecordError, match=re.escape(BEGIN)):
        insert_summary("# A page\n", reports, "page.md")
