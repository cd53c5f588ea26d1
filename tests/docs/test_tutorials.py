"""Every step of every tutorial is run, as a reader without a GPU would."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tutorial_steps import ROOT, TUTORIALS, Reader, python_block, steps_of

needs_cxx = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("document", sorted(TUTORIALS.glob("*.md")), ids=lambda d: d.stem)
def test_every_block_says_what_it_is(document: Path) -> None:
    assert steps_of(document)


@pytest.mark.quick
@pytest.mark.parametrize("document", sorted(TUTORIALS.glob("*.md")), ids=lambda d: d.stem)
def test_excerpts_are_of_the_files(document: Path, reader: Reader) -> None:
    for step in steps_of(document):
        if step.kind == "python excerpt":
            reader.do(step)


@needs_cxx
def test_first_tune_and_the_readme_example(reader: Reader) -> None:
    reader.follow(TUTORIALS / "first-tune.md")
    smaller = {'"cuda"': '"cpu"', "32768": "32", "8192": "256"}
    example = python_block(ROOT / "README.md", "kgen_ops.rmsnorm", smaller)
    assert "rmsnorm" in reader.run(["python", "-c", example], "README.md")


@needs_cxx
def test_new_operator(reader: Reader) -> None:
    reader.follow(TUTORIALS / "new-operator.md")


@pytest.mark.slow  # four minutes, most of them of two tunes
@needs_cxx
def test_training_blocks(reader: Reader) -> None:
    reader.follow(TUTORIALS / "training-blocks.md")
