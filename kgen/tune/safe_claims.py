"""The kernels of the safe variant that are certified, and the extents at which they are certified.

On a GPU these are two sets of dtype combinations. The first one contains every pair of choices
(`Signature.dtype_pairs`) and also gets host runs. The second one has one combination for each other
rendered source: a template may test at run time which tensors are present, so several combinations
share a source. In a tune for the CPU only the first set is certified, because each optional tensor
doubles the number of combinations. A fault that needs three particular choices is not found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem, with_dims
from kgen.model.space import Variant
from kgen.operators.base import Operator
from kgen.trial import Session

# Small, and no multiple of a power of two: only the correctness of the safe variant matters. Dims
# that repeat the work are even smaller (`FEW`), as the work is proportional to their product.
SAFE_EXTENT = 67
FEW = 3
RAGGED_DIMS = 3  # number of last dims with `SAFE_EXTENT`, if the operator declares no `repeats`


@dataclass(frozen=True)
class Combination:
    """The safe kernel of one combination of dtypes.

    Attributes:
        problem: The problem on which it is certified.
        rendered: The kernel's source; other combinations may have the same source.
    """

    problem: Problem
    rendered: Rendered

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The combination."""
        return dict(self.problem.dtypes)


@dataclass(frozen=True)
class Claim:
    """A combination that is to be certified.

    Attributes:
        combination: The combination.
        shows_a_pair: Whether it belongs to the set that covers all pairs of choices, which gets
            host runs in a GPU's tune.
        is_tuned: Whether a problem of the tune has the same source, so that it is certified first.
    """

    combination: Combination
    shows_a_pair: bool
    is_tuned: bool


def safe_config(session: Session) -> tuple[Variant, Config]:
    """The safe variant of the session's pass, and its safe config."""
    variant = session.entry.space.safe_variant(session.pass_name)
    assert variant.safe is not None  # `safe_variant` guarantees it
    return variant, variant.safe


def safe_dims(operator: Operator) -> tuple[tuple[str, int], ...]:
    """The extents at which safe kernels are certified."""
    dims = operator.signature.dims
    few = operator.repeats or [d.name for d in dims[:-RAGGED_DIMS]]
    return tuple((d.name, max(FEW if d.name in few else SAFE_EXTENT, d.smallest)) for d in dims)


def combinations(session: Session) -> list[Combination]:
    """All combinations of dtypes, rendered, in the order of the signature."""
    signature = session.entry.operator.signature
    _, config = safe_config(session)
    dims = safe_dims(session.entry.operator)
    problems = [
        with_dims(Problem(dims, tuple(d.items())), {}, signature)
        for d in signature.dtype_combinations()
    ]
    return [Combination(problem, session.render(config, problem)) for problem in problems]


def claims(
    session: Session, every: Sequence[Combination], tuned: Iterable[Problem]
) -> list[Claim]:
    """The combinations to certify; those of the tuned problems first.

    Args:
        session: The session of the tune.
        every: All combinations.
        tuned: The problems of the tune. If no claim has the source of one, all count as tuned.
    """
    pairs = session.entry.operator.signature.dtype_pairs()
    shown = [one for one in every if one.dtypes in pairs]
    if not session.gpu.is_host:
        seen = {one.rendered.digest for one in shown}
        for one in every:
            if one.rendered.digest not in seen:
                seen.add(one.rendered.digest)
                shown.append(one)
    wanted = [dict(problem.dtypes) for problem in tuned]
    sources = {one.rendered.digest for one in every if one.dtypes in wanted}
    all_are_tuned = not sources <= {one.rendered.digest for one in shown}
    found = [
        Claim(one, one.dtypes in pairs, all_are_tuned or one.rendered.digest in sources)
        for one in shown
    ]
    return sorted(found, key=lambda claim: not claim.is_tuned)


def built(
    session: Session, claim: Claim, build: Future[Artifact | BuildFailure]
) -> Artifact:
    """Wait for a claim's build.

    Raises:
        TuneError: If it does not compile, or must not run.
    """
    variant, config = safe_config(session)
    made = build.result()
    if isinstance(made, BuildFailure):
        raise TuneError(
            f"{variant.where}: the safe variant does not compile for "
            f"{claim.combination.dtypes}\n  {made.message}\n  source: {made.source_path}"
        )
    if refusal := session.refusal(claim.combination.rendered, made, config):
        raise TuneError(f"{variant.where}: the safe variant is refused: {refusal}")
    return made
