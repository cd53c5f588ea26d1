"""Certify the safe variant: it answers what no table row does.

It is built for every combination of dtypes, and run for as many as show every pair of choices
(`Signature.dtype_pairs`). Optional tensors double the combinations each, so running them all would
take longer than a tune; a mistake that needs three particular choices at once is not looked for.
"""

from __future__ import annotations

from kgen.errors import TuneError
from kgen.model.artifact import BuildFailure
from kgen.model.problem import Problem
from kgen.model.record import Fate
from kgen.tune.request import SafeResult
from kgen.worker import Session

# Small, and ragged in every power of two: the safe variant is judged on correctness alone.
SAFE_EXTENT = 67


def verify_safe(session: Session) -> tuple[SafeResult, ...]:
    """Build the safe config for each dtype combination, and certify it for each pair of dtypes.

    Raises:
        TuneError: If one does not build or is wrong: the library would have nothing to fall
            back on.
    """
    signature = session.entry.operator.signature
    variant = session.entry.space.safe_variant(session.pass_name)
    config = variant.safe
    assert config is not None
    dims = tuple((d.name, max(SAFE_EXTENT, d.smallest)) for d in signature.dims)
    certified = signature.dtype_pairs()
    problems = [Problem(dims, tuple(d.items())) for d in signature.dtype_combinations()]
    sources = [session.render(config, problem) for problem in problems]
    builds = [session.build(rendered) for rendered in sources]  # side by side
    results = []
    for problem, rendered, build in zip(problems, sources, builds, strict=True):
        dtypes = dict(problem.dtypes)
        key = session.key(rendered, config, problem)
        built = build.result()
        if isinstance(built, BuildFailure):
            raise TuneError(
                f"{variant.where}: the safe variant does not compile for {dtypes}\n  "
                f"{built.message}\n  source: {built.source_path}"
            )
        if dtypes not in certified:
            results.append(SafeResult(dtypes, variant, config, rendered, built, None))
            continue
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
        results.append(SafeResult(dtypes, variant, config, rendered, built, record))
    return tuple(results)
