"""Dims, dtypes and passes of wkv7."""

from __future__ import annotations

from kgen.model.signature import (
    Dim,
    DTypeField,
    Option,
    Packing,
    Pass,
    Scalar,
    Signature,
    Tensor,
)

_STATE = ("N", "H", "K", "V")
_STEP = ("B", "T", "H")
_ANY_LAYOUT = "the last dim contiguous, any strides of B, T and H."

DECAY_FORM = Option(
    "decay_form",
    ("log", "raw", "clamp"),
    default="log",
    doc="Form of w. log: the log decay, at most 0; -inf is a decay of 0. raw: the decay is "
    "exp(-exp(w)). clamp: the decay is exp(-exp(-0.5) * sigmoid(w)), from 0.545 to 1.",
)


def _rows(name: str, features: str, doc: str, dtype: str = "dtype", layout_of: str = "") -> Tensor:
    """One row of features per step; the caller chooses the strides of B, T and H."""
    return Tensor(
        name, (*_STEP, features), dtype, free_strides=_STEP, layout_of=layout_of, doc=doc
    )


def _gradient(of: str, features: str, dtype: str = "dtype") -> Tensor:
    return _rows(f"g{of}", features, f"dtype and layout of {of}.", dtype, layout_of=of)


_INPUTS = (
    _rows("r", "K", f"fp32, fp16 or bf16; {_ANY_LAYOUT}"),
    _rows("w", "K", "dtype of r, or fp32; the decay, as decay_form says.", "w_dtype"),
    _rows("k", "K", "dtype of r."),
    _rows("v", "V", "dtype of r."),
    _rows("a", "K", "dtype of r; the key that is read and replaced, often -kk."),
    _rows("b", "K", "dtype of r; the key that is replaced, often kk * gate."),
    Tensor(
        "initial_state", _STATE, "initial_state_dtype",
        doc="fp32; S before the first step; None: 0. N is B, or with cu_seqlens the number of "
        "sequences.",
    ),
)
_CU_SEQLENS = Tensor(
    "cu_seqlens", ("N + 1",), "cu_seqlens_dtype",
    doc="int32 or int64; None: every batch row is a sequence. Otherwise B is 1, and sequence n has "
    "the steps cu_seqlens[n] <= t < cu_seqlens[n + 1], possibly none. The first offset must be 0, "
    "the last T, and offsets must not decrease. The values stay on the device and are not checked.",
)

SIGNATURE = Signature(
    dims=(
        Dim("B", "batch"),
        Dim("N", "sequences; B, unless they are packed"),
        Dim("T", "time steps"),
        Dim("H", "heads"),
        Dim("K", "key features", smallest=1),
        Dim("V", "value features", smallest=1, like="K", both="D"),
    ),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32"), default="fp32"),
        DTypeField("initial_state_dtype", ("none", "fp32"), default="none"),
        DTypeField("final_state_dtype", ("none", "fp32"), default="none"),
        DTypeField("cu_seqlens_dtype", ("none", "int32", "int64"), default="none"),
    ),
    options=(DECAY_FORM,),
    packing=Packing(offsets="cu_seqlens", sequences="N", batch="B"),
    passes=(
        Pass(
            "forward",
            inputs=(*_INPUTS, _CU_SEQLENS),
            outputs=(
                _rows("y", "V", "dtype and layout of v.", layout_of="v"),
                Tensor(
                    "final_state", _STATE, "final_state_dtype",
                    doc="fp32; S after the last step.",
                ),
            ),
            scalars=(Scalar("scale", 1.0, doc="Factor of y; often 1 or K ** -0.5."),),
        ),
        Pass(
            "backward",
            inputs=(
                _rows("gy", "V", f"gradient of y; dtype of r; {_ANY_LAYOUT}"),
                *_INPUTS,
                Tensor(
                    "gfinal_state", _STATE, "final_state_dtype",
                    doc="fp32; gradient of final_state.",
                ),
                _CU_SEQLENS,
            ),
            outputs=(
                _gradient("r", "K"),
                _gradient("w", "K", "w_dtype"),
                _gradient("k", "K"),
                _gradient("v", "V"),
                _gradient("a", "K"),
                _gradient("b", "K"),
                Tensor(
                    "ginitial_state", _STATE, "initial_state_dtype",
                    doc="fp32; gradient of initial_state.",
                ),
            ),
            scalars=(Scalar("scale", 1.0, doc="As in the forward pass."),),
        ),
    ),
)
