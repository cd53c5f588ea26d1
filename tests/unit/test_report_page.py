"""The HTML report as a document: whole, offline, small, the same bytes each time."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_report_brief import ALL, FASTER, entry, report, rows, trial

from kgen.cli.main import main
from kgen.report import Environment, write_report
from kgen.report.compared import compare_rows
from kgen.report.page import render_html
from kgen.report.page_data import Shown, page_data
from kgen.report.searches import searches_of

COMMITTED = Path(__file__).parents[2] / "generated"
MOST_BYTES = 3_000_000


class Document(HTMLParser):
    """Elements, and whether they are closed."""

    VOID = frozenset({"meta", "input", "link", "br", "hr", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self._script] = data

    def data(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))


def shown(folder: Path = Path("nowhere"), **more: Any) -> Shown:
    searches = searches_of([trial(12.0), trial(None), trial(9.7)])
    given: dict[str, Any] = {"report": report(*ALL), "rows": rows(*ALL), "searches": searches,
                             "operator": None, "folder": folder} | more
    return Shown(**given)


def test_the_document_is_well_formed_and_loads_nothing() -> None:
    text = render_html([shown()])
    document = Document(text)
    assert document.open == []
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in document.elements:
        assert not {"src", "srcset", "action"} & set(attributes), tag
        assert tag not in ("link", "iframe", "object", "embed", "base")
        if "href" in attributes:
            assert str(attributes["href"]).startswith("#")
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert not re.search(r"url\(\s*['\"]?https?:", text)
    assert "ISC licence" in text
    assert "Permission to use, copy, modify" in text


def test_tables_have_captions_headers_and_can_be_focused() -> None:
    document = Document(render_html([shown()]))
    tags = [tag for tag, _ in document.elements]
    assert tags.count("table") == tags.count("caption") == 1
    assert all("scope" in attributes for tag, attributes in document.elements if tag == "th")
    regions = [a for tag, a in document.elements if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)
    problems = [a for tag, a in document.elements if a.get("class") == "problem"]
    assert len(problems) == len(ALL)


def test_text_of_reports_is_escaped() -> None:
    nasty = replace(FASTER, slowed="</script><script>alert(1)</script>",
                    problem="M=1,N=8,dtype=<b>")
    text = render_html([shown(report=report(nasty), rows=rows(nasty))])
    assert "alert(1)" not in text
    assert "<b>bf16" not in text
    assert "dtype=&lt;b&gt;" in text or "&lt;b&gt;" in text


def test_the_same_reports_give_the_same_bytes() -> None:
    assert render_html([shown()]) == render_html([shown()])


def test_searches_and_refusals_are_in_the_data() -> None:
    row = page_data([shown()]).page["rows"][0]
    assert [t[1] for t in row["search"]["trials"]] == [12.0, None, 9.7]
    assert row["standing"] == "faster"
    assert row["second"]["tie"]
    assert row["refused"] == [[0, 60]]
    assert (row["shape"], row["kind"]) == ("M1 N8", "bf16")


def test_sources_come_from_the_library(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "tables" / "h200.yaml").write_text("rows:\n- record: 7f3a0000\n  kernel: k1\n")
    (tmp_path / "kernels" / "k1.cu").write_text("// the kernel\n")
    data = page_data([shown(tmp_path)])
    assert data.sources == {"k1": "// the kernel\n"}
    assert data.page["rows"][0]["kernel"] == "k1"
    assert not data.page["rows"][0]["same_text"]


def test_an_older_report_is_compared() -> None:
    old = report(entry("M=1,N=8", 20.0))
    old = replace(old, environments={"e1": replace(old.environments["e1"], driver="500")})
    pairs = compare_rows(rows(*old.problems), rows(*ALL))
    page = page_data([shown(old=old, pairs=pairs)]).page
    compared = page["operators"][0]["compared"]
    assert compared["environments"] == ["driver: 500 -> 580"]
    assert [pair["change"] for pair in compared["pairs"]].count("new") == 3
    assert 'data-figure="compared"' in render_html([shown(old=old, pairs=pairs)])


def test_an_environment_without_clocks_and_a_report_without_trials() -> None:
    bare = Environment("CPU", "", "host", "12", "2.11", "3.12", "0.1", "")
    text = render_html([shown(report=replace(report(*ALL), environments={"e1": bare}),
                              searches={})])
    assert 'data-figure="fates"' not in text


def test_the_command_refuses_a_report_of_another_operator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(tmp_path / "kgen_ops" / "rmsnorm" / "reports" / "h200.yaml", report(*ALL))
    write_report(tmp_path / "old.yaml", replace(report(), operator="timex"))
    out = str(tmp_path / "r.html")
    common = ["report", "--out", str(tmp_path), "--html", out]
    assert main([*common, "--against", str(tmp_path / "old.yaml")]) == 2
    assert "is of timex on h200" in capsys.readouterr().err
    assert main(common) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert main([*common, "--problem", "M1"]) == 0
    assert [row["name"] for row in Document(Path(out).read_text()).data("data")["rows"]] == [
        "M1 N8 bf16"]


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="no committed library")
def test_the_page_of_the_committed_results_is_small_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    # A tune of one's own adds another GPU.
    assert main(["report", "--out", str(COMMITTED), "--gpu", "h200", "--html", str(file)]) == 0
    assert file.stat().st_size < MOST_BYTES
    document = Document(file.read_text(encoding="utf-8"))
    data, sources = document.data("data"), document.data("sources")
    assert all(row["kernel"] in sources for row in data["rows"])
    assert all(row["work"]["bytes"] > 0 for row in data["rows"])
    assert {r["gpu"] for r in data["roofs"]} == {"h200"}
