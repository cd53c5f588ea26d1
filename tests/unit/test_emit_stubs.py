"""Stubs of the generated functions: what a type checker knows on a user's file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue
from kgen.emit.functions import function_name
from kgen.emit.stubs import stub_module

CHECKOUT = Path(__file__).resolve().parents[2]
CATALOGUE = open_catalogue()
PASSES = ("forward", "backward")

USE = """
from typing import assert_type

import torch
from torch import Tensor

from kgen_ops.linear_attention import (
    LinearAttentionResultWithFinalStateAndNorm, linear_attention,
)
from kgen_ops.rmsnorm import (
    RmsnormBackwardResult, RmsnormResultWithH, RmsnormResultWithHAndRstd, RmsnormResultWithRstd,
    rmsnorm, rmsnorm_backward,
)
from kgen_ops.timex import timex
from kgen_ops.wkv6 import Wkv6Result, wkv6


def use(x: Tensor, w: Tensor, flag: bool, maybe: Tensor | None) -> None:
    assert_type(rmsnorm(x), Tensor)
    assert_type(rmsnorm(x, w, eps=1e-5), Tensor)
    assert_type(rmsnorm(x, w, x), RmsnormResultWithH)
    assert_type(rmsnorm(x, residual=x), RmsnormResultWithH)
    assert_type(rmsnorm(x, residual=x).h, Tensor)
    assert_type(rmsnorm(x, w, x, return_rstd=True), RmsnormResultWithHAndRstd)
    assert_type(rmsnorm(x, None, None, 1e-6, 0.0, True), RmsnormResultWithRstd)
    either: Tensor | tuple[Tensor, ...] = rmsnorm(x, w, maybe)
    print(either)
    assert_type(rmsnorm_backward(x, x, w), RmsnormBackwardResult)
    assert_type(timex(w, x), Tensor)
    assert_type(wkv6(x, x, x, x, w, decay_form="raw"), Tensor)
    y, state = wkv6(x, x, x, x, w, return_final_state=True)
    assert_type(state, Tensor)
    assert_type(wkv6(x, x, x, x, w, return_final_state=flag), Tensor | Wkv6Result)
    assert_type(linear_attention(x, x, x, return_final_state=True, return_norm=True),
                LinearAttentionResultWithFinalStateAndNorm)
    print(y + torch.ones(1))
"""

WRONG = """
from torch import Tensor

from kgen_ops.rmsnorm import rmsnorm
from kgen_ops.wkv6 import wkv6


def use(x: Tensor) -> None:
    wkv6(x, x, x, x, x, decay_form="loge")
    rmsnorm(x, x).shape.missing
    rmsnorm(x, epsilon=1.0)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("typed")
    for name in CATALOGUE.names:
        folder = root / "kgen_ops" / name
        folder.mkdir(parents=True)
        (folder / "__init__.pyi").write_text(stub_module(CATALOGUE.operator(name), PASSES))
    (root / "kgen_ops" / "__init__.py").touch()
    (root / "kgen_ops" / "py.typed").touch()
    return root


def checked(root: Path, name: str, text: str) -> str:
    (root / name).write_text(text)
    # Half a minute to read torch: once per checkout, and not into the cache of other options.
    options = ("--strict", "--config-file=", "--cache-dir", str(CHECKOUT / ".mypy_cache" / "stubs"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, name, "kgen_ops"],
        cwd=root, capture_output=True, text=True, check=False,
    )
    return done.stdout


@pytest.mark.full
def test_mypy_is_clean_on_a_users_file_and_on_the_stubs(library: Path) -> None:
    assert "Success" in checked(library, "use.py", USE)


@pytest.mark.full
def test_mypy_finds_a_users_mistakes(library: Path) -> None:
    lines = checked(library, "wrong.py", WRONG)
    assert {
        "9", "10", "11"} == set(re.findall(r"wrong\.py:(\d+): error", lines)), lines


@pytest.mark.parametrize("operator", CATALOGUE.names)
def test_a_stub_declares_what_the_module_has(operator: str) -> None:
    passes = [p.name for p in CATALOGUE.operator(operator).signature.passes]
    text = stub_module(CATALOGUE.operator(operator), passes)
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {f.name for f in functions} == {function_name(operator, name) for name in passes}
    assert {name.upper() for name in passes} <= {
        node.target.id for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert max(map(len, text.splitlines())) <= 100
    options = CATALOGUE.operator(operator).signature.options
    assert all(f"{option.name}: Literal[" in text for option in options)
    assert "Any:" not in text


def test_a_pass_that_is_not_emitted_is_not_declared() -> None:
    text = stub_module(CATALOGUE.operator("rmsnorm"), ["forward"])
    assert "backward" not in text.lower()
