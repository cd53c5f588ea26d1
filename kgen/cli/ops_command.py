"""`kgen ops`."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap

from kgen.catalogue import open_catalogue


def run(options: argparse.Namespace) -> int:
    """Print operators with their passes and variants."""
    catalogue = open_catalogue(options.path)
    for name in catalogue.names:
        entry = catalogue.entry(name)
        operator = entry.operator
        also = f" (also: {', '.join(operator.aliases)})" if operator.aliases else ""
        print(f"{operator.name}{also}: {operator.summary}")
        for pass_ in operator.signature.passes:
            variants = entry.space.of_pass(pass_.name)
            size = sum(v.size for v in variants)
            print(f"  {pass_.name}: {len(variants)} variants, {size} configs before rules")
            for variant in variants:
                head = f"    {variant.name:<22} {variant.size:>7}  "
                print(_wrapped(head + first_sentence(variant.doc), len(head)))
    return 0


def first_sentence(text: str) -> str:
    """The first sentence of a text; a first sentence of one word is joined with the second."""
    first, _, rest = text.partition(". ")
    if rest and " " not in first:
        first = f"{first}: {rest.partition('. ')[0]}"
    return first.rstrip(".")


def _wrapped(line: str, indent: int) -> str:
    """A text wrapped to the width of the terminal; without a terminal one line, for grep."""
    if not sys.stdout.isatty():
        return line
    columns = max(shutil.get_terminal_size().columns, indent + 30)
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, drop_whitespace=True)
