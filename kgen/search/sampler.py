"""The Optuna sampler that only ever proposes feasible configs.

It serves two callers: `kgen.search.study` asks it for whole batches, and any Optuna program may
hand it to `optuna.create_study` and suggest parameters one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from kgen.model.config import Config
from kgen.search.encoding import Encoding
from kgen.search.params import ParamSpace
from kgen.search.proposer import Proposer

FATE = "fate"  # trial user attribute: how the trial ended
INTERRUPTED = "interrupted"  # the process died; the config itself has no result
DUPLICATE = "duplicate"  # another process proposed the same config at the same time and runs it
PASSED_OVER = "passed over"  # proposed but not run, because other configs came first
# A config whose process died once is tried again; after two deaths it is not.
_MAX_INTERRUPTIONS = 2


class FeasibleSampler(optuna.samplers.BaseSampler):  # type: ignore[misc,unused-ignore]
    """Propose members of an enumerated feasible set, each at most once.

    The objective suggests `variant` first and then `<variant>.<parameter>` for the parameters of
    that variant, all categorical with `choices` of `ParamSpace.of(feasible)`. The objective's
    value is a median time in microseconds, to be minimised; trials that fail teach the sampler
    where configs do not work. When every config has been tried, the best one is proposed again.

    Args:
        feasible: The feasible set, enumerated.
        seed: Same seed, same history: same proposals.
        first: Configs to propose before any other; infeasible ones are ignored.
        prior_us: Expected times of some or all configs, in microseconds (another GPU or shape);
            only their ratios matter, and the model weighs them by how well measurements agree.
    """

    def __init__(
        self,
        feasible: Sequence[Config],
        seed: int = 0,
        first: Sequence[Config] = (),
        prior_us: Mapping[Config, float] | None = None,
    ) -> None:
        self._encoding = Encoding(feasible)
        self.space = ParamSpace.of(self._encoding.configs)
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(choices) for name, choices in self.space.choices.items()
        }
        self._proposer = Proposer(
            self._encoding,
            seed,
            first=[i for i in map(self.index, first) if i is not None],
            prior_us={
                i: time
                for i, time in ((self.index(c), t) for c, t in (prior_us or {}).items())
                if i is not None
            },
        )
        self._settled: set[int] = set()
        self._interruptions: Counter[int] = Counter()
        self._chosen: dict[int, Config] = {}

    def index(self, config: Config) -> int | None:
        """Return the position of a config in the feasible set, or None."""
        return self._encoding.index(self.space.normal(config))

    def distributions_of(self, config: Config) -> dict[str, BaseDistribution]:
        """Return the distributions of the parameters that the config has."""
        return {name: self.distributions[name] for name in self.space.to_params(config)}

    def propose(self, study: optuna.Study, n: int) -> list[Config]:
        """Return up to n configs that no trial of the study has; fewer when the set runs out."""
        self._learn(study)
        return [self._encoding.configs[i] for i in self._proposer.propose(n)]

    def pass_over(self, variant: str) -> None:
        """Drop a variant's remaining `first` configs."""
        self._proposer.pass_over(variant)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Choose the trial's config; its parameters are the search space of this trial."""
        proposed = self.propose(study, 1)
        config = proposed[0] if proposed else self._encoding.configs[self._proposer.best()]
        self._chosen[trial.number] = config
        return self.distributions_of(config)

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the chosen config as parameters."""
        return dict(self.space.to_params(self._chosen.pop(trial.number)))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse: a parameter sampled by itself could make the config infeasible."""
        raise ValueError(
            f"parameter {param_name!r} is not part of the proposed config {trial.params}\n"
            "  suggest 'variant' first, then only '<variant>.<parameter>' of that variant,\n"
            "  with the choices of ParamSpace.of(feasible)"
        )

    def reseed_rng(self) -> None:
        """Do nothing: proposals depend on the seed and the history only."""

    def _learn(self, study: optuna.Study) -> None:
        """Report new trials of the study, also those of other processes, to the proposer."""
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._settled:
                continue
            config = self.space.config_of(trial.params)
            i = None if config is None else self._encoding.index(config)
            if not trial.state.is_finished():
                if i is not None:
                    self._proposer.pend(i)
                continue
            self._settled.add(trial.number)
            if i is None or trial.user_attrs.get(FATE) == DUPLICATE:
                continue
            if trial.user_attrs.get(FATE) == PASSED_OVER:
                self._proposer.release(i)
            elif trial.state == TrialState.COMPLETE and trial.value is not None:
                self._proposer.tell(i, trial.value)
            elif trial.state == TrialState.PRUNED and trial.intermediate_values:
                # A pruned config is slow, not broken; its last report is used as its time.
                self._proposer.tell(i, trial.intermediate_values[max(trial.intermediate_values)])
            elif trial.user_attrs.get(FATE) == INTERRUPTED and self._forgive(i):
                self._proposer.release(i)
            else:
                self._proposer.tell(i, None)

    def _forgive(self, i: int) -> bool:
        self._interruptions[i] += 1
        return self._interruptions[i] < _MAX_INTERRUPTIONS
