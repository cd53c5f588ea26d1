"""GPU profiles: the hardware facts that rules, plans and floors use."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Facts of one GPU model; vendor data sheets unless a note says otherwise.

    Attributes:
        name: Value of `--gpu`: `h200`.
        title: Full product name: `NVIDIA H200 SXM 141 GB`.
        device_names: Names that the driver reports for this GPU model.
        arch: Compilation target: `sm_90a`; `host` for the CPU.
        sm_count: Streaming multiprocessors.
        smem_per_block: Largest shared memory of one block, bytes (opt-in limit).
        smem_per_sm: Shared memory of one SM, bytes.
        regs_per_sm: 32-bit registers of one SM.
        max_threads_per_sm: Resident threads of one SM.
        max_blocks_per_sm: Resident blocks of one SM.
        l2_bytes: L2 cache, bytes.
        memory_bytes: Device memory, bytes.
        bandwidth_gbps: Peak memory bandwidth, 1e9 bytes per second.
        fp32_tflops: Peak of fp32 FMAs, 1e12 operations per second.
        tf32_tflops: Dense tensor-core peak with TF32 inputs, 1e12 operations per second; 0 on a GPU
            without TF32 tensor cores.
        half_tflops: Dense tensor-core peak with fp16 or bf16 inputs, 1e12 operations per second.
        max_threads_per_block: Threads of one block.
        warp_size: Threads of one warp.
    """

    name: str
    title: str
    device_names: tuple[str, ...]
    arch: str
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    regs_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_gbps: float
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    max_threads_per_block: int = 1024
    warp_size: int = 32

    @property
    def is_host(self) -> bool:
        """Whether this is the CPU running kernels through the host layer."""
        return self.arch == "host"

    @property
    def compute_capability(self) -> int:
        """90 for sm_90a; 0 for the host."""
        digits = "".join(c for c in self.arch if c.isdigit())
        return int(digits) if digits else 0

    @property
    def names(self) -> dict[str, int]:
        """Values of the GPU's names in expressions."""
        return {name: getattr(self, name) for name in GPU_NAMES} | {
            "compute_capability": self.compute_capability
        }


GPU_NAMES: tuple[str, ...] = tuple(
    f.name
    for f in fields(GpuProfile)
    if f.name not in ("name", "title", "device_names", "arch")
    and not f.name.endswith(("gbps", "tflops"))
)
GPU_EXPR_NAMES: frozenset[str] = frozenset((*GPU_NAMES, "compute_capability"))
