"""`kgen completion`."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode


def run(options: argparse.Namespace) -> int:
    """Print the function that a shell calls at TAB."""
    print(shellcode(["kgen"], use_defaults=False, shell=options.shell), end="")
    return 0
