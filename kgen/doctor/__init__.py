"""`kgen doctor`: what is installed, what works, what is missing and what to do about it."""

from kgen.doctor.doctor import Finding, examine

__all__ = ["Finding", "examine"]
