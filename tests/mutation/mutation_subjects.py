"""The kernels that are mutated: one small, feasible config for each path through each kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from kgen.assets import include_dir
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.catalogue import Entry
from kgen.model.artifact import Rendered
from kgen.model.config import Config, Value
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem, parse_problem
from kgen.model.space import Variant

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "softmax"


@dataclass(frozen=True)
class Subject:
    """A kernel to mutate.

    Attributes:
        name: Name for messages.
        operator: Name of the operator in the catalogue.
        variant: A variant of the operator.
        values: The config.
        dims: The problem in the form of `--problem`; small, and ragged if the variant allows it.
        headers: Device headers to mutate as well; each is mutated through one or two subjects.
        pass_name: `forward` or `backward`.
        sm_count: Number of multiprocessors, which sets the number of persistent blocks.
    """

    name: str
    operator: str
    variant: str
    values: Mapping[str, Value] = field(hash=False)
    dims: str
    headers: tuple[str, ...] = ()
    pass_name: str = "forward"
    sm_count: int = 2  # so that there are at least two persistent blocks

    @property
    def host(self) -> GpuProfile:
        """The profile of the device that the subject runs on."""
        return replace(profile_named("host"), sm_count=self.sm_count)

    @property
    def config(self) -> Config:
        """The config in the form that a search proposes."""
        return self.space.config(self.values)

    @property
    def entry(self) -> Entry:
        """The operator with its space and templates."""
        return _catalogue_entry(self.operator)

    @property
    def space(self) -> Variant:
        """The variant's part of the search space."""
        return self.entry.space.variant(self.pass_name, self.variant)

    @property
    def problem(self) -> Problem:
        """The problem."""
        return parse_problem(self.dims, self.entry.operator.signature)

    def render(self, include: Path | None = None) -> Rendered:
        """Render the source; the digest covers the headers in `include` (default: kgen's own)."""
        renderer = Renderer(include_dir() if include is None else include)
        return renderer.render(
            self.operator, self.entry.templates, self.space, self.config, self.problem
        )


@lru_cache
def _catalogue_entry(operator: str) -> Entry:
    return open_catalogue([TUTORIAL]).entry(operator)


_ALL_OPTIONS = "dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32"
_PLAIN: dict[str, Value] = {"store_cache": "normal", "min_blocks": 1}
_REGISTERS: dict[str, Value] = {"vec": 4, "load_cache": "normal", **_PLAIN}

# The number of rows is odd, and the number of columns is no multiple of a group's sweep or of 32,
# so that every tail is run.
SUBJECTS = (
    Subject("naive", "rmsnorm", "naive", {"threads": 64},
            f"M=37,N=203,{_ALL_OPTIONS}"),
    Subject(
        "registers_once", "rmsnorm", "rows_in_registers",
        {"lanes_per_row": 16, "groups_per_block": 4, "rows_per_group": 2,
         "weight_load": "after_reduction", "persistent": False, "prefetch": False, **_REGISTERS},
        f"M=69,N=200,{_ALL_OPTIONS}", ("kgen/primitives/warp.cuh", "kgen/primitives/memory.cuh"),
    ),
    Subject(
        "registers_prefetch", "rmsnorm", "rows_in_registers",
        {"lanes_per_row": 64, "groups_per_block": 2, "rows_per_group": 1, "weight_load": "resident",
         "persistent": True, "prefetch": True, **_REGISTERS},
        "M=37,N=388,dtype=fp32", ("kgen/primitives/block.cuh",),
    ),
    Subject(
        "per_block", "rmsnorm", "row_per_block",
        {"threads": 64, "vec": 4, "load_cache": "normal", "store_cache": "normal"},
        f"M=37,N=456,{_ALL_OPTIONS}",
    ),
    Subject(
        "smem_tree", "rmsnorm", "row_in_smem",
        {"threads": 64, "vec": 4, "reduction": "tree"},
        "M=37,N=200,dtype=fp32",
    ),
    Subject(
        "smem_shuffle", "rmsnorm", "row_in_smem",
        {"threads": 64, "vec": 4, "reduction": "shuffle"},
        "M=37,N=200,dtype=fp32",
    ),
    Subject(
        "two_pass", "rmsnorm", "two_pass",
        {"threads": 32, "vec": 8, "unroll": 1, "reverse": True, "load_cache": "normal",
         "reread_cache": "normal", "store_cache": "normal"},
        "M=37,N=1000,dtype=fp16", ("kgen/primitives/types.cuh", "kgen/primitives/memory.cuh"),
    ),
    Subject(
        "unaligned", "rmsnorm", "unaligned_rows",
        {"lanes_per_row": 32, "groups_per_block": 2, "vec": 4, "prefetch": False,
         "load_cache": "normal", "store_cache": "normal", "min_blocks": 1},
        f"M=37,N=203,{_ALL_OPTIONS}",
    ),
    # Enough blocks that column_sum's loop of eight loads is run, and only by some of the lanes.
    Subject(
        "back_registers", "rmsnorm", "rows_in_registers",
        {"lanes_per_row": 32, "groups_per_block": 1, "vec": 4, "resident_weight": False,
         "prefetch": False, "load_cache": "normal", **_PLAIN},
        "M=300,N=100,dtype=fp32", ("kgen/rows/columns.cuh",), "backward", sm_count=120,
    ),
    Subject(
        "back_unaligned", "rmsnorm", "rows_in_registers",
        {"lanes_per_row": 32, "groups_per_block": 2, "vec": 4, "resident_weight": True,
         "prefetch": True, "load_cache": "normal", **_PLAIN},
        f"M=37,N=203,{_ALL_OPTIONS}", (), "backward",
    ),
    Subject(
        "back_bulk", "rmsnorm", "bulk_rows",
        {"threads": 64, "copies_per_row": 2, "stages": 3, "weight_memory": "registers",
         "load_policy": "normal", **_PLAIN},
        f"M=37,N=512,{_ALL_OPTIONS}", (), "backward",
    ),
    Subject(
        "back_bulk_warps", "rmsnorm", "bulk_rows",
        {"threads": 64, "copies_per_row": 1, "stages": 3, "weight_memory": "shared",
         "load_policy": "normal", **_PLAIN},
        "M=37,N=392,dtype=bf16", ("kgen/primitives/types.cuh",), "backward",
    ),
    Subject(
        "back_two_pass", "rmsnorm", "two_pass",
        {"row_threads": 128, "tile_threads": 64, "vec": 4, "unroll": 2, "row_splits": 4,
         "load_cache": "normal", "store_cache": "normal"},
        "M=37,N=200,dtype=fp32", (), "backward",
    ),
    Subject(
        "back_naive", "rmsnorm", "naive", {"threads": 64, "row_splits": 8},
        "M=37,N=203,dtype=fp32,residual_dtype=fp32", (), "backward",
    ),
    Subject(
        "softmax", "softmax", "block_per_row", {"threads": 64}, "M=37,N=203,dtype=fp32",
        ("kgen/primitives/block.cuh", "kgen/primitives/warp.cuh"),
    ),
)
