"""For all tests: torch computes on one thread.

Its tensors are small here. On several threads, as many in each of pytest's processes, most
of the time goes into waiting for each other. Set before torch is imported; children inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
