"""The names of studies, and the text keys from which they are computed."""

from __future__ import annotations

from kgen.model.config import Config
from kgen.model.digest import digest_of
from kgen.model.problem import Problem
from kgen.search.feasible import Feasible
from kgen.trial import Session
from kgen.tune.joint import Joint
from kgen.tune.reusable_records import CurrentDigests


def text_key_of_config(session: Session, problem: Problem, config: Config) -> str:
    """The `text_key` that a new record of a config has."""
    return session.text_key(session.render(config, problem), config, problem)


def study_name(
    session: Session, problem: Problem, feasible: Feasible, current: CurrentDigests,
    joint: Joint | None,
) -> str:
    """Return the name of a problem's study; it contains a digest of the code that is searched.

    Optuna cannot delete a finished trial. If a template, a header or the compiler changes, a new
    study starts with the records of the journal that are still valid. The name of a study that
    several machines share also depends on the device model, the definition, the guards and the time
    limit.
    """
    samples = {config.variant: config for config in reversed(feasible.configs)}
    keys = [text_key_of_config(session, problem, config) for _, config in sorted(samples.items())]
    # Times on other inputs are another objective. Without trained inputs the name is unchanged.
    keys += [session.trained] if session.trained else []
    if joint is not None:
        guards = [current.guards(config) for _, config in sorted(samples.items())]
        keys = [*keys, joint.device, current.definition, *guards, str(current.trial_s)]
    operator = session.entry.operator.name
    return f"{operator}/{session.pass_name}/{session.gpu.name}/{problem}@{digest_of(keys)}"
