"""The environment of a measurement, for tuning reports and benches."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kgen import __version__
from kgen.build import Compiler
from kgen.report import Environment


def environment_of(
    facts: Mapping[str, str], compiler: Compiler, copy_gbps: float, clocks: Mapping[str, str]
) -> Environment:
    """Describe where measurements were made.

    Args:
        facts: Facts from the worker's probe.
        compiler: Back end that built the kernels.
        copy_gbps: Measured copy bandwidth.
        clocks: Clock state after the last measurement; empty if it cannot be read.
    """
    return Environment(
        device=facts["device"],
        driver=facts.get("driver", ""),
        compiler=compiler.name,
        compiler_version=compiler.version,
        torch=facts["torch"],
        python=platform.python_version(),
        kgen=__version__,
        commit=_commit(),
        copy_gbps=copy_gbps,
        sm_clock_mhz=_number(clocks, "sm_mhz"),
        memory_clock_mhz=_number(clocks, "memory_mhz"),
    )


def _number(facts: Mapping[str, str], name: str) -> float | None:
    text = facts.get(name, "").partition(" ")[0]
    return float(text) if text else None


def _commit() -> str:
    """KGEN_COMMIT, else the checkout's commit, `-dirty` if files were changed; else empty."""
    if named := os.environ.get("KGEN_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
