"""The tuner that `test_kills.py` kills: one tune of the planted operator, from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

from planting import request, run_tune

from kgen.assets import include_dir
from kgen.build import open_compiler

if __name__ == "__main__":
    folder, mine, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    compiler = open_compiler("host" if device == "host" else "nvrtc", [include_dir()])
    result = run_tune(request(folder, mine, compiler, device))
    print(result.results[0].winner.config.label)
