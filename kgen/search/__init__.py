"""Propose configs: an Optuna sampler over the enumerated feasible set, and its study on disk.

`kgen.search.study.open_study` is the door. Nothing here imports Optuna or numpy until a study is
opened, so that a light command stays light.
"""
