"""Propose configs: an Optuna sampler over the enumerated feasible set, and its study on disk.

Use `kgen.search.study.open_study`. Importing this package imports neither Optuna nor numpy, so that
light commands start quickly.
"""
