"""One timing protocol for kernels, finalists and peers (docs/measurement.md).

Import from the modules: `floor` and `stats` are pure arithmetic, and a tuner that wants only
those must not load torch.
"""
