"""The warm start of a search: the configs that it tries first, and in which order.

Kernels compile in 0.1 to 2 s, the promising ones slowest, so configs must not be tried in the order
in which their builds end. The search space defines the order: by the order of its variants and of
each variant's `first`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kgen.model.config import Config
from kgen.model.record import Record
from kgen.model.space import Variant

TOO_SLOW_RATIO = 10.0  # of the best time; no other config of a variant makes up for this ratio
# Verified trials before a variant is judged: its first config may be meant for other shapes.
FAIR_TRIALS = 2


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The warm start of a search.

    Attributes:
        configs: The configs to try first, in order.
        fallback: The safe variant, whose trials come last. Empty if there is none, or if it is as
            promising as the others.
    """

    configs: tuple[Config, ...]
    fallback: str = ""


def warm_start(
    variants: Sequence[Variant],
    allowed: Collection[Config],
    likely: Iterable[Config],
    recorded: Iterable[Config] = (),
) -> WarmStart:
    """Order the configs of a warm start.

    Winners of other problems come first, then the first config of each variant, then the other
    configs of `first`, and the fallback last. A winner of another problem is tried, not adopted: a
    config copied between GPUs was up to 1.5 times slower than the winner there.

    Args:
        variants: The variants of the pass, as its space lists them: the most promising first.
        allowed: The feasible configs.
        likely: Winners of other problems, the most likely first.
        recorded: Winners in the journals of earlier tunes, tried after `likely`. They do not make
            the safe variant promising, because their problems may have little in common with this
            one.
    """
    winners = [config for config in likely if config in allowed]
    # A safe variant that is listed first, or that has won a problem, is not treated as fallback.
    fallback = next(
        (
            v.name
            for v in variants[1:]
            if v.safe is not None and all(w.variant != v.name for w in winners)
        ),
        "",
    )
    declared = {
        v.name: [c for c in (*v.first, *([v.safe] if v.safe else ())) if c in allowed]
        for v in variants
    }
    last = declared.pop(fallback, [])
    winners += [c for c in recorded if c in allowed and c.variant != fallback]
    heads = chain.from_iterable(configs[:1] for configs in declared.values())
    others = chain.from_iterable(configs[1:] for configs in declared.values())
    return WarmStart(tuple(dict.fromkeys([*winners, *heads, *others, *last])), fallback)


def untried_variants(first: WarmStart, known: Collection[Config]) -> set[Config]:
    """The warm-start configs of variants that were added or changed after the known results.

    The limit on trials counts known results, so that the same command resumes where it ended. A
    variant added after they were measured would then never be tried. Such a variant has no result
    although there are more results than configs before its first one in the warm start. Its
    warm-start configs do not count towards the limit.

    Args:
        first: The warm start.
        known: Configs with a result that is still valid.
    """
    tried = {config.variant for config in known}
    begins: dict[str, int] = {}
    for place, config in enumerate(first.configs):
        begins.setdefault(config.variant, place)
    late = {
        variant
        for variant, place in begins.items()
        if variant not in tried and variant != first.fallback and place < len(known)
    }
    return {config for config in first.configs if config.variant in late}


def too_slow_variants(ranking: Sequence[Record]) -> set[str]:
    """The variants that are too slow on a problem to try more of their warm-start configs.

    Args:
        ranking: Verified records, fastest first.
    """
    if not ranking or ranking[0].timing is None:
        return set()
    limit_us = TOO_SLOW_RATIO * ranking[0].timing.median_us
    near = {r.config.variant for r in ranking if r.timing and r.timing.median_us <= limit_us}
    tried = Counter(r.config.variant for r in ranking)
    return {name for name, count in tried.items() if count >= FAIR_TRIALS and name not in near}
