"""`--storage` and its limits."""

from __future__ import annotations

import argparse

from kgen.search.storage import storage_option
from kgen.tune import SharedStorage


def shared_storage(options: argparse.Namespace) -> SharedStorage | None:
    """`--storage` with its limits; None if the option is not given.

    Raises:
        OptionError: If the URL is malformed, or holds a password on the command line.
    """
    url = storage_option(options.storage)
    return None if url is None else SharedStorage(url, options.grace, options.patience)
