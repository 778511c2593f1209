"""`redraft::AddNoise`: the noise of sampling on a drafter's logits, defined in torch and in ONNX.

    noisy = AddNoise(logits, scale, keys, ids)

    logits  float32 [B, S, H]   of S positions
    scale   float32 [B]         factor on the noise; with 0 `noisy` is `logits`, to the bit
    keys    int64 [B, S, 2]     each position's key (`redraft.runtime.sampling.noise.row_key`)
    ids     int64 [H]           each column's token, an id of the full vocabulary
    noisy   float32 [B, S, H]   logits + scale * noise

The noise and its hash are those of `redraft.runtime.sampling.noise`. The ONNX body has only operators that TensorRT has
for int64: no shifts and no bitwise operators. The hash is a function of its own, `TokenHashes`. With x = 2^16 h + l,
2 x^2 + x modulo 2^32 is that of 2 l^2 + 2^18 h l + x, which is below 2^52.
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
from redraft.export.graph.tree_attention import OPSET
from redraft.names import ADD_NOISE, QUADRATIC, TOKEN_HASHES, TREE_ATTENTION_DOMAIN

_WORDS, _HALF, _CROSS = 1 << noise_spec.WORD_BITS, 1 << noise_spec.SHIFT, 4 << noise_spec.SHIFT
_FIRST, _SECOND = noise_spec.FIRST, noise_spec.SECOND
_SCALE, _OFFSET, _SERIES_BELOW = noise_spec.UNIFORM_SCALE, noise_spec.UNIFORM_OFFSET, float(noise_spec.SERIES_BELOW)
_THIRD = 1 / 3


@torch.library.custom_op("redraft::add_noise", mutates_args=())
def add_noise(logits: torch.Tensor, scale: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the operator in torch."""
    first, second = keys[..., :1], keys[..., 1:]
    x = _quadratic((ids * _FIRST + first) % _WORDS)
    x = _quadratic(((x + x // _HALF) % _WORDS * _SECOND + second) % _WORDS)
    v = x.float() * _SCALE + _OFFSET
    series = v * (1 + v * (0.5 + v * (_THIRD + v * 0.25)))
    exponential = torch.where(x < _SERIES_BELOW, series, -(1 - v).log())
    return logits - scale[:, None, None] * exponential.log()


def _quadratic(x: torch.Tensor) -> torch.Tensor:
    """Return x (2 x + 1) modulo 2^32."""
    high, low = x // _HALF, x % _HALF
    return (2 * low * low + _CROSS * high * low + x) % _WORDS


add_noise.register_fake(lambda logits, *_: torch.empty_like(logits))


@script(OPSET, default_opset=op)
def Quadratic(x):  # type: ignore[no-untyped-def]
    """x (2 x + 1) modulo 2^32."""
    half = op.Constant(value_int=_HALF)
    high, low = op.Div(x, half), op.Mod(x, half)
    square = op.Add(op.Add(low, low), op.Mul(high, op.Constant(value_int=_CROSS)))
    return op.Mod(op.Add(op.Mul(low, square), x), op.Constant(value_int=_WORDS))


@script(OPSET, default_opset=op)
def TokenHashes(keys, ids):  # type: ignore[no-untyped-def]
    """The hash of each id and key [B, S, H], in any integer type."""
    words, half = op.Constant(value_int=_WORDS), op.Constant(value_int=_HALF)
    first, second = op.Split(keys, axis=2, num_outputs=2)
    x = Quadratic(op.Mod(op.Add(op.Mul(ids, op.Constant(value_int=_FIRST)), first), words))
    x = op.Mod(op.Add(x, op.Div(x, half)), words)
    return Quadratic(op.Mod(op.Add(op.Mul(x, op.Constant(value_int=_SECOND)), second), words))


@script(OPSET, default_opset=op)
def AddNoise(logits, scale, keys, ids):  # type: ignore[no-untyped-def]
    """Logits [B, S, H] and scaled noise."""
    one = op.Constant(value_float=1.0)
    word = op.Cast(TokenHashes(keys, ids), to=1)
    v = op.Add(op.Mul(word, op.Constant(value_float=_SCALE)), op.Constant(value_float=_OFFSET))
    series = op.Add(op.Mul(v, op.Constant(value_float=0.25)), op.Constant(value_float=_THIRD))
    series = op.Add(op.Mul(v, series), op.Constant(value_float=0.5))
    series = op.Mul(v, op.Add(op.Mul(v, series), one))
    small = op.Less(word, op.Constant(value_float=_SERIES_BELOW))
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
    """Append the function bodies, each before its callers, if the model has AddNoise nodes."""
    if all(node.op_type != ADD_NOISE for node in model.graph.all_nodes()):
        return
    for name, body in ((QUADRATIC, Quadratic), (TOKEN_HASHES, TokenHashes), (ADD_NOISE, AddNoise)):
        function = ir.serde.deserialize_function(body.to_function_proto())
        assert function.name == name
        model.functions[function.identifier()] = function
    model.opset_imports[TREE_ATTENTION_DOMAIN] = 1
