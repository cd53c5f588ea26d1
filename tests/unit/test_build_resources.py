"""The parser of ptxas' log, against logs as CUDA 13.0 wrote them."""

from __future__ import annotations

from kgen.build import parse_remarks, parse_resources
from kgen.model.record import Resources

NVCC = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'c' for 'sm_90a'
ptxas info    : Function properties for c
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
ptxas info    : Compile time = 29.410 ms
ptxas info    : Function properties for _Z1ff
    16 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    640 bytes stack frame, 396 bytes spill stores, 436 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 640 bytes cumulative stack size
ptxas info    : Compile time = 35.617 ms
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 4096 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 1.531 ms
"""
NVRTC = NVCC.replace("\n    ", "\nptxas         .     ")
WANTED = (
    ("a", Resources(14, 0, 0, 4096)),
    ("b", Resources(32, 832, 640, 0)),
    ("c", Resources(24, 0, 0, 0)),
)


def test_nvcc_log() -> None:
    assert parse_resources(NVCC) == WANTED


def test_nvrtc_log() -> None:
    assert parse_resources(NVRTC) == WANTED


def test_a_callees_frame_counts_its_spills_do_not() -> None:
    log = """\
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 48 bytes cumulative stack size
ptxas info    : Function properties for helper
ptxas         .     40 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""
    assert parse_resources(log) == (("k", Resources(40, 0, 48, 0)),)


def test_other_lines_are_passed_over() -> None:
    assert parse_resources("") == ()
    assert parse_resources("x.cu(3): warning #177-D: variable \"i\" was declared\n") == ()


def test_remarks() -> None:
    slow = "wgmma.mma_async instructions are serialized due to a function call in the function 'k'"
    line = f"(C7510) Potential Performance Loss: {slow}"
    log = f"ptxas info    : {line}\n{NVCC}ptxas         . {line} \n" + (
        "ptxas info    : (C7507) Potential Performance Loss: 'setmaxnreg' ignored.\n"
    )
    assert parse_remarks(log) == (f"C7510: {slow}", "C7507: 'setmaxnreg' ignored.")
    assert parse_remarks(NVRTC) == ()
