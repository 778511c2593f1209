"""`redraft::AddNoise`: the noise of sampling on a drafter's logits, defined in torch and in ONNX.

    noisy = AddNoise(logits, scale, keys, ids)

    logits  float32 [B, S, H]   of S positions
    scale   float32 [B]         factor on the noise; with 0 `noisy` is `logits`, to the bit
    keys    int64 [B, S, 2]     each position's key (`redraft.noise_spec.row_key`)
    ids     int64 [H]           each column's token, an id of the full vocabulary
    noisy   float32 [B, S, H]   logits + scale * noise

`redraft.noise_spec` defines the noise. The ONNX body has only operators that TensorRT has for int64: no shifts and no
bitwise operators. The hash is a function of its own, `TokenWords`.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx import defs
from onnxscript import script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Op

from redraft import noise_spec
from redraft.export.tree_attention import OPSET
from redraft.names import ADD_NOISE, TREE_ATTENTION_DOMAIN

_WORDS, _SHIFTED = 1 << noise_spec.WORD_BITS, 1 << noise_spec.SHIFT
_SCALE, _OFFSET, _SERIES_BELOW = noise_spec.UNIFORM_SCALE, noise_spec.UNIFORM_OFFSET, float(noise_spec.SERIES_BELOW)
_THIRD = 1 / 3


@torch.library.custom_op("redraft::add_noise", mutates_args=())
def add_noise(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the operator in torch."""
    first, second = keys[..., :1], keys[..., 1:]
    x = first + ids
    for number in range(noise_spec.ROUNDS):
        if number:
            x = x + x // _SHIFTED
        x = x * (2 * x + (second if number % 2 == 0 else first)) % _WORDS
    v = x.float() * _SCALE + _OFFSET
    exponential = torch.where(x < _SERIES_BELOW, v * (1 + v * (0.5 + v * _THIRD)), -(1 - v).log())
    return logits - scale[:, None, None] * exponential.log()


@add_noise.register_fake
def _(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


@script(OPSET, default_opset=op)
def TokenWords(keys, ids):  # type: ignore[no-untyped-def]
    """The hash of each id and key [B, S, H], in any integer type."""
    words = op.Constant(value_int=_WORDS)
    shifted = op.Constant(value_int=_SHIFTED)
    first, second = op.Split(keys, axis=2, num_outputs=2)
    x = op.Add(first, ids)
    x = op.Mod(op.Mul(x, op.Add(op.Add(x, x), second)), words)
    x = op.Add(x, op.Div(x, shifted))
    x = op.Mod(op.Mul(x, op.Add(op.Add(x, x), first)), words)
    x = op.Add(x, op.Div(x, shifted))
    return op.Mod(op.Mul(x, op.Add(op.Add(x, x), second)), words)


@script(OPSET, default_opset=op)
def AddNoise(logits, scale, keys, ids):  # type: ignore[no-untyped-def]
    """Logits [B, S, H] and scaled noise."""
    one = op.Constant(value_float=1.0)
    word = op.Cast(TokenWords(keys, ids), to=1)
    v = op.Add(op.Mul(word, op.Constant(value_float=_SCALE)), op.Constant(value_float=_OFFSET))
    series = op.Add(op.Mul(v, op.Constant(value_float=_THIRD)), op.Constant(value_float=0.5))
    series = op.Mul(v, op.Add(op.Mul(v, series), one))
    small = op.Less(word, op.Constant(value_float=_SERIES_BELOW))  # float32 has these words exactly
    exponential = op.Where(small, series, op.Neg(op.Log(op.Sub(one, v))))
    factor = op.Unsqueeze(scale, op.Constant(value_ints=[1, 2]))
    return op.Sub(logits, op.Mul(factor, op.Log(exponential)))


def _schema() -> defs.OpSchema:
    floats, integers = "tensor(float)", "tensor(int64)"
    types = {"logits": floats, "scale": floats, "keys": integers, "ids": integers}
    return defs.OpSchema(
        ADD_NOISE,
        TREE_ATTENTION_DOMAIN,
        1,
        inputs=[defs.OpSchema.FormalParameter(name, kind) for name, kind in types.items()],
        outputs=[defs.OpSchema.FormalParameter("noisy", floats)],
    )


_NODE = Op(OPSET, ADD_NOISE, _schema())


def emit_add_noise(logits: Any, scale: Any, keys: Any, ids: Any) -> Any:
    """Translate the torch operator for `torch.onnx.export` into one node."""
    return _NODE(logits, scale, keys, ids)


def add_bodies(model: ir.Model) -> None:
    """Append the function bodies if the model has AddNoise nodes."""
    if all(node.op_type != ADD_NOISE for node in model.graph.all_nodes()):
        return
    for body in (TokenWords, AddNoise):
        function = ir.serde.deserialize_function(body.to_function_proto())
        model.functions[function.identifier()] = function
    model.opset_imports[TREE_ATTENTION_DOMAIN] = 1
