"""Propose configs: an Optuna sampler over the enumerated feasible set, and its study on disk.

Use `kgen.search.study.open_study`; in an Optuna program of your own, `FeasibleSampler`. Importing
this package imports neither Optuna nor numpy, so that light commands start quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.search.sampler import FeasibleSampler

__all__ = ["FeasibleSampler"]


def __getattr__(name: str) -> object:
    if name == "FeasibleSampler":
        from kgen.search.sampler import FeasibleSampler

        return FeasibleSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
