"""One timing protocol for kernels, finalists and peers (docs/measurement.md).

Import from the modules: `floor` and `stats` are pure arithmetic and do not load torch.
"""
