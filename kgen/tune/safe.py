"""Verify the safe variant for every combination of dtypes: it answers what no table row does."""

from __future__ import annotations

from kgen.errors import TuneError
from kgen.model.artifact import Artifact, BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.tune.request import SafeResult
from kgen.worker import Session

# Small, and ragged in every power of two: the safe variant is judged on correctness alone.
SAFE_EXTENT = 67


def verify_safe(session: Session) -> tuple[SafeResult, ...]:
    """Build and certify the safe config for each dtype combination.

    Raises:
        TuneError: If one does not build or is wrong: the library would have nothing to fall
            back on.
    """
    signature = session.entry.operator.signature
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    dims = tuple((d.name, max(SAFE_EXTENT, d.smallest)) for d in signature.dims)
    results = []
    for dtypes in signature.dtype_combinations():
        problem = Problem(dims, tuple(dtypes.items()))
        rendered = session.render(config, problem)
        key = session.key(rendered, config, problem)
        built = session.build(rendered).result()
        if isinstance(built, BuildFailure):
            raise TuneError(
                f"{variant.where}: the safe variant does not compile for {dtypes}\n  "
                f"{built.message}\n  source: {built.source_path}"
            )
        record = next(
            (r for r in session.journal.read() if r.key == key and r.fate is Fate.VERIFIED), None
        )
        if record is None:
            candidate = session.candidate(config, built)
            outcome = session.run(candidate, problem, certify=True, measure=False)
            record = session.record(config, problem, rendered, key, outcome, built)
        if record.fate is not Fate.VERIFIED:
            raise TuneError(
                f"{variant.where}: the safe variant is {record.fate} for {problem}\n  "
                f"{record.reason}"
            )
        assert isinstance(built, Artifact)
        results.append(SafeResult(dtypes, variant, config, rendered, built, record))
    return tuple(results)
