"""What a problem's search begins with, in which order, and which variants get no more of it.

Kernels compile in 0.1 to 2 s, the promising ones slowest. So neither the order in which builds end
nor that of the study says what is to be tried first: a space's author does, by the order of the
variants and of each one's `first`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kgen.model.config import Config
from kgen.model.record import Record
from kgen.model.space import Variant

OUTCLASSED = 10.0  # times the best: beyond what another config of the same variant makes good
# Verified trials before a variant is judged: the first of them may be meant for other shapes.
FAIR_TRIALS = 2


@dataclass(frozen=True, slots=True)
class FirstTrials:
    """How a search begins.

    Attributes:
        configs: In the order in which they are wanted.
        fallback: The variant whose trials come last: the safe one, which is there to be right.
            Empty if there is none, or if it is as promising as the others.
    """

    configs: tuple[Config, ...]
    fallback: str = ""


def first_trials(
    variants: Sequence[Variant], allowed: Collection[Config], likely: Iterable[Config]
) -> FirstTrials:
    """Put what is to be tried first in order.

    Likely winners come first, then the first config of each variant, then the variants' others,
    and the fallback last. Another shape's winner is a good first trial and a bad answer: copying
    one between GPUs costs up to 1.5 x, so it is tried, not trusted.

    Args:
        variants: Of the pass, as its space lists them: the most promising first.
        allowed: The feasible configs.
        likely: Winners of other problems, the most likely first.
    """
    winners = [config for config in likely if config in allowed]
    # Who lists the safe variant first, or has seen it win, does not mean a last resort.
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
    heads = chain.from_iterable(configs[:1] for configs in declared.values())
    others = chain.from_iterable(configs[1:] for configs in declared.values())
    return FirstTrials(tuple(dict.fromkeys([*winners, *heads, *others, *last])), fallback)


def owed(first: FirstTrials, known: Collection[Config]) -> set[Config]:
    """The first trials of variants that are newer than what is known, in text or in name.

    A limit on trials counts what is known, so that the same command goes on where it ended. But if
    all of it was known before a variant was written, or written anew, that would never be tried.
    Such a variant has no result, though there are more of them than configs that go before its
    first one. Its first trials are on top of the limit.

    Args:
        first: How the search begins.
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


def outclassed(ranking: Sequence[Record]) -> set[str]:
    """The variants that are so slow on a problem that their first trials are not worth going on.

    Args:
        ranking: Verified records, fastest first.
    """
    if not ranking or ranking[0].timing is None:
        return set()
    limit_us = OUTCLASSED * ranking[0].timing.median_us
    near = {r.config.variant for r in ranking if r.timing and r.timing.median_us <= limit_us}
    tried = Counter(r.config.variant for r in ranking)
    return {name for name, count in tried.items() if count >= FAIR_TRIALS and name not in near}
