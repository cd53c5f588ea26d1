"""The HTML report in a real browser: drawn without errors, quick, searchable, reachable by keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from devtools import Page, find_chromium, open_page

from kgen.cli.main import main
from kgen.coverage import CoverageReport, load_coverage, write_coverage

COMMITTED = Path(__file__).parents[2] / "generated"
CHROMIUM = find_chromium()
READY = "document.documentElement?.dataset.complete === 'yes'"  # all figures are drawn
OPENS_MS = 2000

# The least contrast of text and background, as WCAG 2 defines it from their luminances.
LEAST_CONTRAST = """(() => {
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (l) => (Math.max(l, back) + 0.05) / (Math.min(l, back) + 0.05);
  return Math.min(...[...document.querySelectorAll('p, td, th, a, summary, .faster')]
    .map((node) => contrast(light(getComputedStyle(node).color))));
})()"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install chromium"),
    pytest.mark.skipif(not COMMITTED.is_dir(), reason="no committed library"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    old = COMMITTED / "kgen_ops" / "rmsnorm" / "reports" / "h200.yaml"
    steps = file.with_name("timex.yaml")
    where = ["--out", str(COMMITTED)]
    # In another process, because it imports the committed library, and a process can import one.
    subprocess.run([sys.executable, "-m", "kgen", "coverage", *where, "--op", "timex",
                    "--gpu", "h200", "--steps", "--yaml", str(steps)], check=True)
    timed = file.with_name("timed.yaml")
    write_coverage(timed, with_ratios(load_coverage(steps)))
    drawn = ["--coverage", str(steps), "--coverage", str(timed)]
    assert main(["report", *where, "--html", str(file), "--against", str(old), *drawn]) == 0
    return file


def with_ratios(report: CoverageReport) -> CoverageReport:
    """The coverage as if it had been timed, with made-up times; the last problem of each pass
    failed."""
    problems = [
        replace(p, kernel_us=10.0, floor_us=5.0, peer="eager", peer_us=10.0 + i, ratio=1 + i / 10)
        for i, p in enumerate(report.problems)
    ]
    last = {p.pass_name: i for i, p in enumerate(problems)}
    for i in last.values():
        problems[i] = replace(report.problems[i], failed="wrong: y[0] is NaN")
    return replace(report, problems=tuple(problems))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with open_page(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, report: Path) -> Iterator[Page]:
    browser.call("Page.navigate", url="about:blank")
    browser.wait("location.href === 'about:blank'")
    browser.events.clear()
    browser.open(report, READY)
    yield browser
    assert browser.errors() == []
    assert browser.evaluate("kgenReport.state.failed.length") == 0


def count(page: Page, selector: str) -> int:
    return int(page.evaluate(f"document.querySelectorAll({selector!r}).length"))


def test_every_figure_is_drawn_and_has_a_table(page: Page) -> None:
    figures = count(page, "main .figure[data-figure]")
    assert figures >= 1 + 5 * 3
    assert count(page, ".figure[data-drawn] figure > [role=img][aria-label]") == figures
    assert count(page, ".figure[data-figure] details.table") == figures
    page.evaluate("document.querySelectorAll('details.table').forEach((d) => { d.open = true; })")
    page.wait(f"document.querySelectorAll('details.table tbody').length === {figures}")
    assert page.evaluate(
        "[...document.querySelectorAll('details.table tbody')].every((b) => b.rows.length > 0)"
    )
    assert page.evaluate("document.querySelector('[data-figure=compared] svg') !== null")


def test_the_page_opens_within_two_seconds_and_loads_nothing(page: Page) -> None:
    # The least of five times, because other processes of the machine may use the processor.
    opened = [float(page.evaluate("document.documentElement.dataset.readyMs"))]
    for _ in range(4):
        page.evaluate("delete document.documentElement.dataset.complete")
        page.call("Page.reload")
        page.wait(READY)
        opened.append(float(page.evaluate("document.documentElement.dataset.readyMs")))
    assert min(opened) < OPENS_MS
    assert {address.partition(":")[0] for address in page.requests()} <= {"file", "about"}


def test_the_search_keeps_what_has_all_words(page: Page) -> None:
    def search(text: str) -> None:
        page.evaluate(
            "(() => { const box = document.querySelector('#search'); "
            f"box.value = {text!r}; box.dispatchEvent(new Event('input')); }})()"
        )

    def visible() -> list[str]:
        found: list[str] = page.evaluate(
            "[...document.querySelectorAll('tr[data-row]')].filter((r) => r.offsetParent)"
            ".map((r) => r.closest('section.operator').dataset.op + ' ' + r.cells[0].textContent)"
        )
        return found

    everything = len(visible())
    search("rmsnorm forward bf16")
    page.wait("document.querySelector('#found').textContent !== "
              f"'{everything} problems'")
    some = visible()
    assert 0 < len(some) < everything
    assert all(line.startswith("rmsnorm") and "bf16" in line for line in some)
    assert page.evaluate("document.querySelector('#found').textContent") == f"{len(some)} problems"
    search("nothing has this")
    page.wait("document.querySelector('#found').textContent === '0 problems'")
    assert visible() == []
    search("")
    page.wait(f"document.querySelector('#found').textContent === '{everything} problems'")
    assert len(visible()) == everything


def test_maps_of_populations_are_searched_and_tell_what_failed(page: Page) -> None:
    def cells() -> dict[str, int]:
        """Rows of the tables behind the maps that are shown, by the maps' titles."""
        page.evaluate("document.querySelectorAll('[data-figure=population] details.table')"
                      ".forEach((d) => { d.open = true; })")
        page.wait("[...document.querySelectorAll('[data-figure=population]:not([hidden]) "
                  "details.table')].every((d) => d.querySelector('tbody'))")
        found: dict[str, int] = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('[data-figure=population]')]"
            ".filter((f) => !f.hidden).map((f) => [f.dataset.map + ' ' + "
            "f.querySelector('h4').textContent, f.querySelectorAll('tbody tr').length]))")
        return found

    shown = cells()
    steps = "0 timex forward: dispatch step by shape and kind"
    ratios = "1 timex forward: fastest peer / kgen by shape and kind"
    assert shown[steps] == shown[ratios] > 60
    assert "wrong: y[0] is NaN" in page.evaluate(
        "document.querySelector('[data-map=\"1\"] tbody').textContent")
    page.evaluate("(() => { const box = document.querySelector('#search'); box.value = "
                  "'timex forward fp16'; box.dispatchEvent(new Event('input')); })()")
    page.wait("document.querySelector('[data-map=\"0\"][data-pass=backward]').hidden")
    page.wait(READY)
    some = cells()
    assert set(some) == {steps, ratios}
    assert 0 < some[steps] < shown[steps]


def test_every_problem_opens_with_its_figures_and_source(page: Page) -> None:
    problems = count(page, "details.problem")
    page.evaluate("document.querySelectorAll('details.problem').forEach((d) => { d.open = true; })")
    page.wait(f"document.querySelectorAll('[data-figure=final][data-drawn]').length === {problems}")
    assert count(page, "details.problem [data-figure]") == count(
        page, "details.problem [data-figure][data-drawn]")
    assert count(page, "details.problem [data-figure=convergence] svg") > problems / 2
    page.evaluate("document.querySelector('details.source').open = true")
    page.wait("document.querySelector('details.source pre') !== null")
    source = page.evaluate("document.querySelector('details.source pre').textContent")
    assert "// digest: " in source


def test_keys_reach_the_search_the_problems_and_the_tables(page: Page) -> None:
    page.key("/", 191, "/")
    assert page.evaluate("document.activeElement.id") == "search"
    reached = set()
    for _ in range(60):
        page.key("Tab", 9)
        reached.add(page.evaluate(
            "document.activeElement.tagName + ' ' + (document.activeElement.className || '')"
        ).strip())
    assert {"SUMMARY", "DIV scroll", "A"} <= reached
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node.get("role", {}).get("value") for node in tree]
    assert {"table", "columnheader", "rowheader", "searchbox", "navigation", "main"} <= set(roles)
    names = [node.get("name", {}).get("value") for node in tree
             if node.get("role", {}).get("value") == "image"]
    assert names
    assert all(names)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page: Page, theme: str) -> None:
    page.call("Emulation.setEmulatedMedia",
              features=[{"name": "prefers-color-scheme", "value": theme}])
    assert page.evaluate(LEAST_CONTRAST) >= 4.5
    page.call("Emulation.setEmulatedMedia", features=[])


def test_the_page_prints(page: Page) -> None:
    pdf = page.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 100_000
