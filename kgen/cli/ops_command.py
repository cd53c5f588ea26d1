"""`kgen ops`."""

from __future__ import annotations

import argparse

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
                print(f"    {variant.name:<22} {variant.size:>7}  {_first_sentence(variant.doc)}")
    return 0


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")
