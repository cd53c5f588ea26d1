"""`kgen report --html`: one file that needs no network.

Tables of results are plain HTML. The page's own script draws the figures and the details of a
problem from compressed data in the file.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from kgen import __version__
from kgen.model.units import format_us
from kgen.report.page_data import PageData, Shown, page_data
from kgen.report.population_map import PopulationMap

_SCRIPTS = ("d3.min.js", "plot.min.js", "report.js")


def render_html(shown: Sequence[Shown], maps: Sequence[PopulationMap] = ()) -> str:
    """Return the page of some reports, with maps of populations."""
    import jinja2

    data: PageData = page_data(shown, maps)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kgen.report", "web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(us=format_us, share=_share, ratio=_ratio)
    return environment.get_template("report.html.jinja").render(
        version=__version__,
        operators=data.page["operators"],
        rows=data.page["rows"],
        maps=data.page["maps"],
        has_searches=any(row["search"]["trials"] for row in data.page["rows"]),
        style=_web("report.css"),
        scripts=[_web(name) for name in _SCRIPTS],
        licences=_web("LICENSES.txt"),
        data=_packed(data.page),
        sources=_packed(data.sources),
    )


def _web(name: str) -> str:
    return (resources.files("kgen.report") / "web" / name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Data as JSON, compressed and encoded as text; equal data give equal text."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.3f}" if abs(ratio - 1) < 0.01 else f"{ratio:.2f}"
