"""The errors of dispatch; light, so that importing the library stays cheap."""

from __future__ import annotations


class DispatchError(RuntimeError):
    """No kernel of the library serves the call."""


class FamilyError(RuntimeError):
    """A family cannot be instantiated here."""


class CheckError(RuntimeError):
    """Two kernels of one problem disagree."""
