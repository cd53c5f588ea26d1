"""`kgen doctor`."""

from __future__ import annotations

import argparse

from kgen.doctor import examine


def run(options: argparse.Namespace) -> int:
    """Print the findings; 1 if something that kgen needs is missing."""
    broken = []
    for finding in examine():
        mark = "ok" if finding.ok else ("MISSING" if finding.needed else "absent")
        print(f"{finding.what:<16} {mark:<8} {finding.detail}")
        if finding.needed and not finding.ok:
            broken.append(finding.what)
    if broken:
        print(f"\nkgen cannot work without: {', '.join(broken)}")
    return 1 if broken else 0
