"""Reports as a picture (SVG): kgen's time, the fastest peer's and the floor of every problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from kgen.model.units import format_us
from kgen.report.model import Report
from kgen.report.tables import ReportRow, rows_of

# Sizes in pixels, and the largest number of letters of a label; the tooltip has the whole label.
_COLUMN = 556
_LABEL = 284
_LABEL_LETTERS = 44
_PLOT = 200
_ROW = 16
_GROUP = 26
_TOP = 58
_LEGEND = 250
_LEGEND_ROW = 20  # for the legend of a single column, which does not fit beside the title
_BOTTOM = 34
_MARGIN = 14

_Place = Callable[[float], float]  # microseconds -> x

_STYLE = """\
<style>
  text { font: 11px system-ui, sans-serif; fill: #1f2328; }
  .card { fill: #ffffff; stroke: #d1d9e0; }
  .title { font-size: 14px; font-weight: 600; }
  .group { font-weight: 600; }
  .minor { fill: #59636e; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .link { stroke: #818b98; stroke-width: 1.5; }
  .floor { stroke: #818b98; stroke-width: 2; }
  .kgen { fill: #0969da; }
  .peer { fill: #ffffff; stroke: #bc4c00; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .card { fill: #0d1117; stroke: #3d444d; }
    .minor { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .kgen { fill: #58a6ff; }
    .peer { fill: #0d1117; stroke: #f0883e; }
  }
</style>"""


def draw_svg(reports: Sequence[Report], with_unpaired: bool = False) -> str:
    """Return a picture of all problems that were timed beside a peer.

    Equal reports give equal bytes.

    Each problem is a line with a tick (floor), a disc (kgen) and a ring (fastest peer) over a
    logarithmic axis of microseconds. Each pass has a column, each operator a group of lines.

    Args:
        reports: The reports of any operators and GPUs.
        with_unpaired: Whether to draw also the problems that were timed without a peer.
    """
    rows = [row for report in reports for row in rows_of(report)
            if with_unpaired or row.fastest is not None]
    passes = list(dict.fromkeys(row.report.pass_name for row in rows))
    passes.sort(key=lambda name: name != "forward")
    columns = [[row for row in rows if row.report.pass_name == name] for name in passes]
    low, high = _range(rows)
    top = _TOP if len(columns) > 1 else _TOP + _LEGEND_ROW
    height = top + _BOTTOM + max((_column_height(column) for column in columns), default=0)
    width = 2 * _MARGIN + _COLUMN * max(len(columns), 1)
    devices = sorted({e.device for report in reports for e in report.environments.values()})
    body: list[str] = []
    for index, (name, column) in enumerate(zip(passes, columns, strict=True)):
        body += _draw_column(_MARGIN + _COLUMN * index, top, name, column, low, high, height)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="Time of kgen and of the fastest '
        'peer">',
        _STYLE,
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="{_MARGIN}" y="24">Time per call, microseconds '
        f"({escape(', '.join(devices))})</text>",
        *(_legend(width - _MARGIN - _LEGEND, 20) if len(columns) > 1
          else _legend(_MARGIN + 5, 20 + _LEGEND_ROW)),
        *body,
        "</svg>",
    ]) + "\n"


def _range(rows: Sequence[ReportRow]) -> tuple[int, float]:
    """Least and largest log10 of the axis; floors below the least are drawn at the left edge."""
    times = [row.kgen_us for row in rows]
    times += [row.fastest.timing.median_us for row in rows if row.fastest is not None]
    times = times or [1.0, 10.0]
    return math.floor(math.log10(min(times))), round(math.log10(max(times)) + 0.1, 2)


def _column_height(rows: Sequence[ReportRow]) -> int:
    return _ROW * len(rows) + _GROUP * len({(row.gpu, row.operator) for row in rows})


def _legend(x: int, y: int) -> list[str]:
    return [
        f'<circle class="kgen" cx="{x}" cy="{y}" r="4.5"/>',
        f'<text x="{x + 9}" y="{y + 4}">kgen</text>',
        f'<circle class="peer" cx="{x + 56}" cy="{y}" r="4"/>',
        f'<text x="{x + 65}" y="{y + 4}">fastest peer</text>',
        f'<line class="floor" x1="{x + 150}" x2="{x + 150}" y1="{y - 5}" y2="{y + 5}"/>',
        f'<text x="{x + 157}" y="{y + 4}">hardware floor</text>',
    ]


def _draw_column(
    left: int, top: int, name: str, rows: Sequence[ReportRow], low: int, high: float, height: int
) -> list[str]:
    start = left + _LABEL

    def place(us: float) -> float:
        share = (math.log10(us) - low) / (high - low) if us > 0 else 0.0
        return start + _PLOT * min(max(share, 0.0), 1.0)

    parts = [f'<text class="group" x="{left}" y="{top - 8}">{escape(name)}</text>',
             f'<text class="minor" x="{start + _PLOT + 48}" y="{top - 8}" text-anchor="end">'
             "peer / kgen</text>"]
    for decade in range(low, math.floor(high) + 1):
        x = place(10.0**decade)
        parts += [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - _BOTTOM}"/>',
            f'<text class="minor" x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">'
            f"{format_us(10.0**decade)}</text>",
        ]
    y = float(top)
    for (_, operator), group in groupby(rows, key=lambda row: (row.gpu, row.operator)):
        parts.append(f'<text class="group" x="{left}" y="{y + 18:.1f}">{escape(operator)}</text>')
        y += _GROUP
        for row in group:
            parts += _draw_row(left, y + _ROW / 2, row, place)
            y += _ROW
    return parts


def _draw_row(left: int, y: float, row: ReportRow, place: _Place) -> list[str]:
    fastest = row.fastest
    ours, floor = place(row.kgen_us), place(row.report.floor_us)
    title = (f"{row.operator} {row.report.pass_name} {row.label}: "
             f"kgen {format_us(row.kgen_us)} us, "
             + (f"{fastest.name} {format_us(fastest.timing.median_us)} us, " if fastest else "")
             + f"floor {format_us(row.report.floor_us)} us")
    # The line leads from kgen to the peer, or to the floor if there is no peer.
    theirs = place(fastest.timing.median_us) if fastest else floor
    parts = [
        f"<g><title>{escape(title)}</title>",
        f'<text x="{left + 8}" y="{y + 4:.1f}">{escape(_short(row.label))}</text>',
        f'<line class="link" x1="{ours:.1f}" x2="{theirs:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<line class="floor" x1="{floor:.1f}" x2="{floor:.1f}" y1="{y - 5:.1f}" '
        f'y2="{y + 5:.1f}"/>',
    ]
    if fastest:
        parts.append(f'<circle class="peer" cx="{theirs:.1f}" cy="{y:.1f}" r="4"/>')
    ratio = "–" if row.ratio is None else f"{row.ratio:.2f}"
    return [
        *parts,
        f'<circle class="kgen" cx="{ours:.1f}" cy="{y:.1f}" r="4.5"/>',
        f'<text x="{left + _LABEL + _PLOT + 48}" y="{y + 4:.1f}" text-anchor="end">'
        f"{ratio}</text></g>",
    ]


def _short(label: str) -> str:
    return label if len(label) <= _LABEL_LETTERS else f"{label[: _LABEL_LETTERS - 1].rstrip()}…"
