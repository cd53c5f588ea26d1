"""`kgen device-library`."""

from __future__ import annotations

import argparse

from kgen.assets import include_dir
from kgen.report.device_library import device_library_markdown
from kgen.report.storage import write_whole


def run(options: argparse.Namespace) -> int:
    """Print or write the reference of the device library."""
    page = device_library_markdown(include_dir())
    if options.markdown is None:
        print(page, end="")
    else:
        write_whole(options.markdown, page)
    return 0
