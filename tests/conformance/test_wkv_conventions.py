"""wkv's kernels with packed sequences and with w in a form that is not the default.

`test_host.py` has only few of these problems among all others. Variants that take no packed
sequences are tested with both forms of w without them.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, SHUFFLED, all_variants, run_configs, spread
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
PACKED = {
    "wkv6": f"B=1,N=5,T=67,H=2,K=16,V=12,dtype=fp32,{STATES},cu_seqlens_dtype=int32,decay_form=raw",
    "wkv5": "B=1,N=3,T=67,H=2,K=16,V=8,dtype=bf16,cu_seqlens_dtype=int64,decay_form=decay",
}
# For variants that take neither states nor w in fp32.
PACKED_16_BITS = (
    "B=1,N=5,T=67,H=2,K=12,V=20,dtype=bf16,w_dtype=bf16,cu_seqlens_dtype=int32,decay_form=raw"
)
# With 67 steps the last chunk is partial; with 12 keys the last tile of 16 keys is partial.
SEPARATE = (
    f"B=2,T=67,H=2,K=12,V=20,dtype=bf16,w_dtype=fp32,{STATES},decay_form=raw",
    "B=2,T=67,H=2,K=12,V=20,dtype=fp16,decay_form=decay",
    "B=2,T=67,H=2,K=64,V=64,dtype=bf16,w_dtype=fp32,decay_form=raw",  # for warp_specialized
)


def variants_in_turn() -> list[tuple[str, str, str]]:
    """Pairs of wkv5's and wkv6's variants of one name; in every second pair wkv5 comes first."""
    of_wkv5, of_wkv6 = ([v for v in all_variants() if v[0] == name] for name in ("wkv5", "wkv6"))
    pairs = enumerate(zip(of_wkv5, of_wkv6, strict=True))
    return [variant for place, pair in pairs for variant in (pair if place % 2 else pair[::-1])]


@pytest.mark.parametrize(("operator", "pass_name", "name"), one_of(2, variants_in_turn()))
def test_conventions(operator: str, pass_name: str, name: str) -> None:
    entry = open_catalogue().entry(operator)
    variant, signature = entry.space.variant(pass_name, name), entry.operator.signature

    def one_config_each(*texts: str) -> list[tuple[Problem, Config]]:
        problems = [parse_problem(text, signature) for text in texts]
        return [(p, c) for p in problems for c in spread(variant, signature, p, count=1)]

    wanted = (
        one_config_each(PACKED[operator])
        or one_config_each(PACKED_16_BITS)
        or one_config_each(*SEPARATE)
    )
    assert wanted, "no config of this variant is feasible for these problems"
    outcomes = run_configs(entry, variant, "host", wanted, (BY_RANK, SHUFFLED))
    for problem, config, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
