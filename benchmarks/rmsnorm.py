"""Compare rmsnorm of the installed `kgen_ops` with its peers, in one interleaved run.

    pip install ./generated
    python benchmarks/rmsnorm.py [--problem M=..,N=..,dtype=..] [--out results.yaml]

Kernels are timed by kgen's own protocol (docs/measurement.md). They are captured in CUDA graphs, so
that the host cost of a call does not count. The host cost is measured separately, end to end, on a
problem so small that the GPU waits for the host. A contender is timed only if its results agree
with float64.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kgen_ops
import torch
import yaml

from kgen.measure.call_cost import call_costs
from kgen.measure.clocks import clocks
from kgen.measure.compare import compare
from kgen.measure.memory import copy_bandwidth, sets_needed
from kgen.model.problem import Problem, parse_problem
from kgen.operators.rmsnorm import EPS, OPERATOR

PROBLEMS = (
    "M=262144,N=4096,dtype=fp32",
    "M=262144,N=4096,dtype=bf16",
    "M=32768,N=8192,dtype=bf16",
    "M=4096,N=32768,dtype=bf16",
    "M=1048576,N=128,dtype=bf16",
    "M=8192,N=4096,dtype=bf16",
    "M=8191,N=5003,dtype=bf16",
    "M=64,N=4096,dtype=bf16",
    "M=1,N=4096,dtype=bf16",
)
HOST_PROBLEM = "M=64,N=4096,dtype=bf16"
OURS, COPY = "kgen", "copy"
SCALARS = OPERATOR.scalars("forward")
ROUNDS = 61

Peer = Callable[[Mapping[str, torch.Tensor], Mapping[str, float]], object]


def competitors() -> dict[str, Peer]:
    """kgen_ops and every peer that this machine has, by name."""
    ours: dict[str, Peer] = {
        OURS: lambda inputs, scalars: kgen_ops.rmsnorm(
            inputs["x"], inputs["w"], eps=scalars["eps"]
        )
    }
    return ours | dict(OPERATOR.peers("forward"))


def check(problem: Problem, peer: Peer, inputs: Mapping[str, torch.Tensor]) -> None:
    """Exit if the results of a contender differ from float64; compare at most 1024 rows."""
    rows = {"x": inputs["x"][:1024], "w": inputs["w"]}
    want = OPERATOR.definition(
        "forward", {name: t.double() for name, t in rows.items()}, SCALARS
    )["y"]
    got = peer(rows, SCALARS)
    assert isinstance(got, torch.Tensor)
    error = ((got.double() - want).norm() / want.norm()).item()
    allowed = 2 * problem.dtype("dtype").eps
    if not error <= allowed:
        raise SystemExit(f"{problem}: relative error {error:.2e} is above {allowed:.2e}")


def run_problem(text: str, device: torch.device, l2_bytes: int, copy_gbps: float) -> dict[str, Any]:
    """Time all competitors and a copy of the same bytes."""
    problem = parse_problem(text, OPERATOR.signature)
    cost = OPERATOR.cost("forward", problem)
    free = torch.cuda.mem_get_info(device)[0]
    generator = torch.Generator(device=device).manual_seed(0)
    sets = [
        OPERATOR.make_inputs("forward", problem, "normal", generator, device)
        for _ in range(sets_needed(cost.bytes, l2_bytes, free // 3))
    ]
    calls: dict[str, Sequence[Callable[[], object]]] = {}
    for name, peer in competitors().items():
        check(problem, peer, sets[0])
        calls[name] = [partial(peer, s, SCALARS) for s in sets]
    targets = [torch.empty_like(s["x"]) for s in sets]
    calls[COPY] = [partial(t.copy_, s["x"]) for s, t in zip(sets, targets, strict=True)]
    result = compare(calls, device, rounds=ROUNDS, uncaptured=(COPY,))
    times = {name: timing.median_us for name, timing in result.timings.items()}
    ours = times[OURS]
    peers = {name: us for name, us in times.items() if name not in (OURS, COPY)}
    fastest = min(peers, key=lambda name: peers[name])
    floor_us = cost.bytes / copy_gbps / 1e3
    print(f"\n{problem}   floor {floor_us:.4g} us")
    for name, us in sorted(times.items(), key=lambda item: item[1]):
        timing = result.timings[name]
        print(
            f"  {name:<14} {us:>10.4g} us  [{timing.low_us:.4g}, {timing.high_us:.4g}]  "
            f"{cost.bytes / us / 1e3:>7.0f} GB/s  {100 * floor_us / us:>4.0f} % of the floor  "
            f"{us / ours:.3f} x kgen"
        )
    return {
        "problem": str(problem),
        "floor_us": round(floor_us, 3),
        "us": {name: round(us, 3) for name, us in times.items()},
        "quartiles_us": {
            n: [round(t.low_us, 3), round(t.high_us, 3)] for n, t in result.timings.items()
        },
        "protocol": result.timings[OURS].protocol,
        "kgen_share_of_floor": round(floor_us / ours, 4),
        "kgen_share_of_copy_in_this_run": round(times[COPY] / ours, 4),
        "fastest_peer": fastest,
        "fastest_peer_over_kgen": round(peers[fastest] / ours, 4),
    }


def host_cost(device: torch.device) -> dict[str, Any]:
    """Host time of a call, measured as by `kgen bench --call-cost`, and of a bare allocation."""
    problem = parse_problem(HOST_PROBLEM, OPERATOR.signature)
    generator = torch.Generator(device=device).manual_seed(0)
    inputs = OPERATOR.make_inputs("forward", problem, "normal", generator, device)
    x, w = inputs["x"], inputs["w"]
    plain: dict[str, Callable[[], object]] = {
        OURS: lambda: kgen_ops.rmsnorm(x, w, eps=EPS),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, EPS),
        "torch.empty_like": lambda: torch.empty_like(x),
    }
    for name, peer in OPERATOR.peers("forward").items():
        if name != "eager":
            plain[name] = partial(peer, inputs, SCALARS)
    for call in plain.values():
        call()
    found = call_costs(plain, device, torch.cuda.synchronize)
    medians = {cost.name: cost.median_us for cost in found}
    compiled = kgen_ops._runtime.launcher.compiled_launcher() is not None
    print(
        f"\nhost time of a call, {problem} ({'compiled' if compiled else 'pure Python'} launcher)"
    )
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        print(f"  {name:<18} {median:>7.2f} us")
    return {
        "problem": str(problem),
        "compiled_launcher": compiled,
        "us": {name: round(median, 3) for name, median in medians.items()},
    }


def main() -> int:
    """Run all problems; return 1 if kgen_ops is slower than a peer on any of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problem", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    copy_gbps = copy_bandwidth(device)
    print(f"{properties.name}, torch {torch.__version__}, device copy {copy_gbps:.0f} GB/s")
    with torch.no_grad():
        host = host_cost(device)
        results = [
            run_problem(text, device, properties.L2_cache_size, copy_gbps)
            for text in options.problem or PROBLEMS
        ]
    state = clocks(device)
    if options.out:
        options.out.write_text(
            yaml.safe_dump(
                {
                    "device": properties.name,
                    "torch": str(torch.__version__),
                    "copy_gbps": round(copy_gbps, 1),
                    "sm_mhz": state.sm_mhz if state else None,
                    "throttle": list(state.throttle) if state else None,
                    "host": host,
                    "problems": results,
                },
                sort_keys=False,
            )
        )
    behind = [r["problem"] for r in results if r["fastest_peer_over_kgen"] < 1.0]
    print(f"\nbehind the fastest peer: {', '.join(behind) or 'nowhere'}")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
