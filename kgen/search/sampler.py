"""The Optuna sampler that only ever proposes feasible configs.

It serves two callers: `kgen.search.study` asks it for whole batches, and any Optuna program may
hand it to `optuna.create_study` and suggest parameters one by one.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from kgen.model.config import Config, Value
from kgen.search.encoding import Encoding
from kgen.search.params import ParamSpace
from kgen.search.plain import PLAIN, PlainSpace, as_config
from kgen.search.proposer import Proposer
from kgen.search.share import WHOLE, Share

FATE = "fate"  # trial user attribute: how the trial ended
INTERRUPTED = "interrupted"  # the process died; the config itself has no result
DUPLICATE = "duplicate"  # another process proposed the same config at the same time and runs it
CLAIM = "kgen:config"  # trial system attribute: the parameters that were chosen for it
PASSED_OVER = "passed over"  # proposed but not run, because other configs came first
# A config whose process died once is tried again; after two deaths it is not.
_MAX_INTERRUPTIONS = 2

Prior: TypeAlias = Mapping[Config, float] | Iterable[tuple[Mapping[str, Value], float]]


class FeasibleSampler(optuna.samplers.BaseSampler):  # type: ignore[misc,unused-ignore]
    """Propose members of an enumerated feasible set, each at most once.

    For any Optuna program that minimises a time over a finite set of configs, such as

        sampler = FeasibleSampler.of({"x": [1, 2, 4], "y": [1, 2]}, lambda c: c["x"] * c["y"] <= 4)
        study = optuna.create_study(sampler=sampler)
        study.optimize(objective, n_trials=100)

    The objective suggests the parameters of the config in any order, by `suggest_categorical`,
    `suggest_int` or `suggest_float` with a range that has the config's value; with configs of
    several key sets it suggests first what decides about the others. Its value is a positive time
    in any unit, to be minimised. A trial that fails (`optimize(..., catch=...)`, or told the state
    FAIL) teaches the sampler where configs do not work; a pruned trial counts with its last report.
    When every config has been tried, the best one is proposed again.

    The sampler learns from the study alone: it works with `n_jobs > 1`, `ask` and `tell`, several
    processes on one storage, and a study that is loaded again. A running trial keeps its config;
    trials that a killed process left running keep theirs until they are told (with `RDBStorage`,
    `heartbeat_interval` does that). Two processes that propose at the same moment may choose the
    same config. Needs nothing but Optuna and numpy; a proposal costs 5 to 30 ms of one core.

    Args:
        feasible: The feasible set, enumerated: mappings from parameter names to values, or `Config`
            objects of kgen, whose parameters are `variant` and `<variant>.<parameter>`.
        seed: The same seed and the same history give the same proposals.
        first: Configs to propose before any other; infeasible ones are ignored.
        prior_us: Expected times of some or all configs, in any unit (another GPU or shape); only
            their ratios matter, and the model weighs them by how well measurements agree. Pairs if
            the configs are mappings.
    Raises:
        ValueError: If the feasible set is empty. Later, from a trial: if the study maximises or has
            several objectives, if a value is not positive, or if the objective suggests what the
            config does not have.
    """

    def __init__(
        self,
        feasible: Iterable[Config] | Iterable[Mapping[str, Value]],
        seed: int = 0,
        first: Iterable[Config] | Iterable[Mapping[str, Value]] = (),
        prior_us: Prior | None = None,
    ) -> None:
        configs = [as_config(config) for config in feasible]
        self._encoding = Encoding(configs)
        is_plain = self._encoding.variants == (PLAIN,)
        self.space: ParamSpace = (PlainSpace if is_plain else ParamSpace).of(self._encoding.configs)
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(choices) for name, choices in self.space.choices.items()
        }
        pairs = prior_us.items() if isinstance(prior_us, Mapping) else (prior_us or ())
        known = ((self.index(as_config(config)), time) for config, time in pairs)
        self._proposer = Proposer(
            self._encoding,
            seed,
            first=[i for i in map(self.index, map(as_config, first)) if i is not None],
            prior_us={i: time for i, time in known if i is not None},
        )
        self._settled: set[int] = set()
        self._interruptions: Counter[int] = Counter()
        self._chosen: dict[int, Config] = {}
        self._lock = threading.Lock()  # for `optimize(n_jobs=...)`

    @classmethod
    def of(
        cls,
        choices: Mapping[str, Sequence[Value]],
        rule: Callable[[dict[str, Value]], bool] = lambda config: True,
        *,
        seed: int = 0,
        first: Iterable[Mapping[str, Value]] = (),
    ) -> FeasibleSampler:
        """Enumerate the feasible set: all combinations of choices that a rule allows.

        Args:
            choices: The values of each parameter.
            rule: Whether a combination is feasible; called once for each.
            seed: See `FeasibleSampler`.
            first: See `FeasibleSampler`.
        Raises:
            ValueError: If no combination is feasible.
        """
        every = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
        feasible = [config for config in every if rule(config)]
        if not feasible:
            count = math.prod(map(len, choices.values()))
            raise ValueError(
                f"the rule allows none of the {count} combinations of {', '.join(choices)}\n"
                "  add choices, or loosen the rule"
            )
        return cls(feasible, seed, first)

    def __len__(self) -> int:
        """The number of feasible configs."""
        return len(self._encoding)

    def index(self, config: Config) -> int | None:
        """Return the position of a config in the feasible set, or None."""
        return self._encoding.index(self.space.normal(config))

    def distributions_of(self, config: Config) -> dict[str, BaseDistribution]:
        """Return the distributions of the parameters that the config has."""
        return {name: self.distributions[name] for name in self.space.to_params(config)}

    def propose(self, study: optuna.Study, n: int, share: Share = WHOLE) -> list[Config]:
        """Return up to n configs that no trial of the study has; fewer when the set runs out.

        Not thread-safe.

        Args:
            study: The study whose results count.
            n: Most configs.
            share: The part of the set from which this process proposes; the whole set once no
                config of the part is free. Processes that share a part choose at random,
                independent of the seed; the configs of `first` still come in order.
        """
        self._learn(study)
        part = None if share.parts == 1 else share.members(len(self))
        wanted = n if self._proposer.has_first else max(n, share.spread)
        picks = self._proposer.propose(wanted, part)
        chosen = picks if len(picks) <= n else random.SystemRandom().sample(picks, n)
        for i in set(picks).difference(chosen):
            self._proposer.release(i)
        return [self._encoding.configs[i] for i in chosen]

    def pass_over(self, variant: str) -> None:
        """Drop a variant's remaining `first` configs."""
        self._proposer.pass_over(variant)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Choose the trial's config, and return no distributions.

        `sample_independent` returns the config's values one by one, because only the objective
        knows the kind of distribution of each parameter.
        """
        directions = [direction.name for direction in study.directions]
        if directions != ["MINIMIZE"]:
            raise ValueError(
                f"FeasibleSampler minimises one time; the study's directions are {directions}\n"
                "  create the study with direction='minimize'"
            )
        with self._lock:
            config = self._given(trial)
            if config is None:
                proposed = self.propose(study, 1)
                config = proposed[0] if proposed else self._encoding.configs[self._proposer.best()]
            self._chosen[trial.number] = config
            # Other processes see a parameter only when the objective has suggested it.
            study._storage.set_trial_system_attr(
                trial._trial_id, CLAIM, dict(self.space.to_params(config))
            )
        return {}

    def _given(self, trial: FrozenTrial) -> Config | None:
        """The config that the trial already has, from `enqueue_trial` or another process."""
        for name in (CLAIM, "fixed_params"):
            config = self.space.config_of(trial.system_attrs.get(name, {}))
            if config is not None:
                return config
        return None

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return nothing; see `sample_independent`."""
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a parameter of the chosen config.

        Raises:
            ValueError: If the config has no such parameter, or the distribution lacks its value.
        """
        params = self.space.to_params(self._chosen[trial.number])
        if param_name not in params:
            advice = (
                "suggest the parameters of the feasible set that the config has"
                if isinstance(self.space, PlainSpace)
                else "suggest 'variant' first, then only '<variant>.<parameter>' of that variant"
            )
            raise ValueError(
                f"parameter {param_name!r} is not part of the proposed config {dict(params)}\n"
                f"  {advice}"
            )
        value = params[param_name]
        try:
            is_in_range = param_distribution._contains(param_distribution.to_internal_repr(value))
        except (TypeError, ValueError):  # the value is not a number, or not among the choices
            is_in_range = False
        if not is_in_range:
            raise ValueError(
                f"the feasible set proposes {param_name}={value!r}, which the objective's "
                f"{param_distribution} does not have\n"
                "  suggest the parameter with every value that it has in the feasible set"
            )
        return value

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Drop the config that was chosen for the trial."""
        self._chosen.pop(trial.number, None)

    def reseed_rng(self) -> None:
        """Do nothing: proposals depend on the seed and the history only."""

    def _learn(self, study: optuna.Study) -> None:
        """Report new trials of the study, also those of other processes, to the proposer."""
        for trial in study.get_trials(deepcopy=False):
            if trial.number in self._settled:
                continue
            config = self.space.config_of(trial.params)
            i = None if config is None else self._encoding.index(config)
            claim = self.space.config_of(trial.system_attrs.get(CLAIM, {}))
            claimed = None if claim is None else self._encoding.index(claim)
            if not trial.state.is_finished():
                if (running := i if claimed is None else claimed) is not None:
                    self._proposer.mark_pending(running)
                continue
            self._settled.add(trial.number)
            if claimed is not None and trial.state == TrialState.FAIL:
                i = claimed  # the trial may have failed before it suggested all parameters
            elif claimed is not None and claimed != i:
                self._proposer.release(claimed)
            if i is None or trial.user_attrs.get(FATE) == DUPLICATE:
                continue
            if trial.user_attrs.get(FATE) == PASSED_OVER:
                self._proposer.release(i)
            elif trial.state == TrialState.COMPLETE and trial.value is not None:
                self._proposer.tell(i, _positive(trial.value, trial))
            elif trial.state == TrialState.PRUNED and trial.intermediate_values:
                # A pruned config is slow, not broken; its last report is used as its time.
                last = trial.intermediate_values[max(trial.intermediate_values)]
                self._proposer.tell(i, _positive(last, trial))
            elif trial.user_attrs.get(FATE) == INTERRUPTED and self._may_retry(i):
                self._proposer.release(i)
            else:
                self._proposer.tell(i, None)

    def _may_retry(self, i: int) -> bool:
        self._interruptions[i] += 1
        return self._interruptions[i] < _MAX_INTERRUPTIONS


def _positive(time: float, trial: FrozenTrial) -> float:
    if not (math.isfinite(time) and time > 0):
        raise ValueError(
            f"trial {trial.number} has the value {time}; FeasibleSampler takes positive times\n"
            "  return a time from the objective, or raise and let `optimize(catch=...)` record it"
        )
    return time
