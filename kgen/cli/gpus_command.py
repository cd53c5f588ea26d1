"""`kgen gpus`."""

from __future__ import annotations

import argparse

from kgen.catalogue import load_profiles


def run(options: argparse.Namespace) -> int:
    """Print the GPU profiles."""
    print(f"{'name':<11} {'arch':<8} {'SMs':>4} {'GB/s':>6} {'fp32 TF':>8} {'half TF':>8}  title")
    for profile in load_profiles().values():
        numbers = (
            f"{profile.sm_count:>4} {profile.bandwidth_gbps:>6.0f} {profile.fp32_tflops:>8.1f} "
            f"{profile.half_tflops:>8.1f}"
        )
        if profile.is_host:
            numbers = f"{'-':>4} {'-':>6} {'-':>8} {'-':>8}"
        print(f"{profile.name:<11} {profile.arch:<8} {numbers}  {profile.title}")
    return 0
