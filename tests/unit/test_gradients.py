"""Names that tie the two passes of an operator together for autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kgen.catalogue import links_of, open_catalogue
from kgen.errors import CatalogueError
from kgen.operators.base import Gradients, Operator
from kgen.operators.linear_attention import OPERATOR as LINEAR_ATTENTION
from kgen.operators.rmsnorm import OPERATOR as RMSNORM
from kgen.runtime.signature import Dot


@pytest.mark.parametrize("name", open_catalogue().names)
def test_every_floating_input_has_a_gradient(name: str) -> None:
    operator = open_catalogue().operator(name)
    links = links_of(operator)
    if all(p.name != "backward" for p in operator.signature.passes):
        assert links is None
        return
    assert links is not None
    forward = operator.signature.pass_named("forward")
    whole = {t.name for t in forward.inputs if t.name == "cu_seqlens"}
    assert set(links.outgoing) == {t.name for t in forward.inputs} - whole


def test_a_residual_shares_the_gradient_and_what_is_saved_is_the_sum() -> None:
    links = links_of(RMSNORM)
    assert links is not None
    assert links.incoming == {"dy": "y", "dh": "h"}
    assert links.saved == {"x": ("h", "x"), "w": ("w",), "rstd": ("rstd",)}
    assert links.outgoing == {"x": "dx", "w": "dw", "residual": "dx"}


def test_one_pass_alone_has_no_links() -> None:
    passes = RMSNORM.signature.passes[:1]
    assert links_of(replace(RMSNORM, signature=replace(RMSNORM.signature, passes=passes))) is None


@pytest.mark.parametrize(
    ("operator", "gradients", "message"),
    [
        (LINEAR_ATTENTION, Gradients(), "backward input 'gout_dot_out' refers to gout_dot_out"),
        (RMSNORM, Gradients(saved={"x": ("sum",)}), "backward input 'x' refers to sum"),
        (RMSNORM, Gradients(shared={"residual": "gx"}), "gradient of 'residual' refers to gx"),
        (LINEAR_ATTENTION, Gradients(dots=(Dot("gout_dot_out", "gout", "y", "norm"),)),
         "backward input 'gout_dot_out' refers to y"),
        (LINEAR_ATTENTION, Gradients(dots=(Dot("gout_dot_out", "q", "out", "norm"),)),
         "backward input 'gout_dot_out' refers to q"),
    ],
)
def test_names_that_autograd_does_not_have_are_refused(
    operator: Operator, gradients: Gradients, message: str
) -> None:
    with pytest.raises(CatalogueError, match=message) as raised:
        links_of(replace(operator, gradients=gradients))
    assert "operator's `gradients`" in str(raised.value)
