"""One forward pass of a Hugging Face decoder as a graph: token tree in, logits, features and updated KV buffers out.

The architecture's own code runs; its attention, cache and mask go through transformers' interfaces to `TreeAttention`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset24 as op
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights
from transformers.masking_utils import AttentionMaskInterface

from redraft import names, signatures
from redraft.errors import RedraftError, UnsupportedModelError
from redraft.export import modules, tree_attention
from redraft.names import Dtype, TensorSpec

INTERFACE = "redraft_tree"
HARMLESS = {"dropout", "position_ids", "position_embeddings", "use_cache", "output_attentions", "is_causal"}
OPSET = 24
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TRACED_NODES = 4
TRACED_BATCH = 2
TRACED_CAPACITY = 16


@torch.library.custom_op("redraft::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row `rows[b, r]` of each sequence: x [B, T, n], rows [B, R] -> [B, R, n]."""
    return torch.gather(x, 1, rows[..., None].expand(-1, -1, x.shape[2]))


@gather_rows.register_fake
def _(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows.shape[0], rows.shape[1], x.shape[2])


def emit_gather_rows(x: Any, rows: Any) -> Any:
    """Translation for `torch.onnx.export`: whole rows are copied."""
    return op.GatherND(x, op.Unsqueeze(rows, op.Constant(value_ints=[-1])), batch_dims=1)


TRANSLATIONS = {
    torch.ops.redraft.tree_attention.default: tree_attention.emit,
    torch.ops.redraft.rms_norm.default: modules.emit_rms_norm,
    torch.ops.redraft.rotary.default: modules.emit_rotary,
    torch.ops.redraft.gather_rows.default: emit_gather_rows,
}


@dataclass
class _Pass:
    """What one forward pass hands to the attention interface and collects from it and the hooks."""

    tree_mask: torch.Tensor
    positions: torch.Tensor
    past_len: torch.Tensor
    live: torch.Tensor
    output_rows: torch.Tensor
    caches: list[torch.Tensor]
    presents: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    features: dict[str, torch.Tensor] = field(default_factory=dict)


_CURRENT: ContextVar[_Pass] = ContextVar("redraft_pass")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, T, Hq, D]."""
    surplus = sorted(k for k, v in rest.items() if k not in HARMLESS and v is not None and v is not False)
    if surplus:
        raise UnsupportedModelError(f"attention of {type(module).__name__} uses {', '.join(surplus)}, not supported")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{type(module).__name__} attends in both directions, which no decoder does")
    if query.shape[-1] != value.shape[-1]:
        raise UnsupportedModelError(f"{type(module).__name__} has keys and values of different head sizes, unsupported")
    current, layer = _CURRENT.get(), int(module.layer_idx)  # type: ignore[arg-type]
    batch, heads, nodes, size = query.shape
    flat = [x.transpose(1, 2).reshape(batch, nodes, -1) for x in (query, key, value)]
    out, *present = torch.ops.redraft.tree_attention(
        *flat,
        current.caches[2 * layer],
        current.caches[2 * layer + 1],
        current.tree_mask,
        current.positions,
        current.past_len,
        current.live,
        float(scaling if scaling is not None else size**-0.5),
        float(softcap or 0.0),
        int(sliding_window or 0),
        heads,
        key.shape[1],
    )
    current.presents[layer] = (present[0], present[1])
    return out.view(batch, nodes, heads, size), None


AttentionInterface.register(INTERFACE, _attend)
AttentionMaskInterface.register(INTERFACE, lambda *args, **kwargs: None)


class VerifierModule(nn.Module):
    """The graph's contract around a model: inputs and outputs in the order of `redraft.names`."""

    def __init__(self, model: nn.Module, taps: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.taps = taps
        model.get_output_embeddings().register_forward_pre_hook(_wanted_rows)  # type: ignore[operator]
        for tap in taps:
            _tapped(model, tap).register_forward_hook(_collect(tap))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tree_mask: torch.Tensor,
        past_len: torch.Tensor,
        live: torch.Tensor,
        output_rows: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Shapes as in `redraft.names.verifier_inputs` and `verifier_outputs`."""
        current = _Pass(tree_mask, positions, past_len, live, output_rows, caches)
        token = _CURRENT.set(current)
        try:
            logits = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits.float()
        finally:
            _CURRENT.reset(token)
        presents = [cache for layer in sorted(current.presents) for cache in current.presents[layer]]
        return (logits, *(current.features[tap] for tap in self.taps), *presents)


def _tapped(model: nn.Module, tap: str) -> nn.Module:
    """The module whose output is the feature `tap`: a layer, or the final norm."""
    decoder: Any = model.base_model
    found = getattr(decoder, "norm", None) if tap == names.LAST_TAP else getattr(decoder, "layers", None)
    if found is None:
        raise UnsupportedModelError(f"{type(model).__name__} names its layers otherwise: no feature {tap!r}")
    module: nn.Module = found if tap == names.LAST_TAP else found[int(tap)]
    return module


def _wanted_rows(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (gather_rows(args[0], _CURRENT.get().output_rows), *args[1:])


def _collect(tap: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        _CURRENT.get().features[tap] = output if isinstance(output, torch.Tensor) else output[0]

    return hook


@contextmanager
def empty_model(config: PretrainedConfig, max_positions: int, dtype: Dtype = "float32") -> Iterator[nn.Module]:
    """The architecture with uninitialized weights, whose pages are never touched, and single operators put in."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=INTERFACE, dtype=TORCH[dtype]).eval()
        model.tie_weights()
        modules.unroll_experts(model)
    model.requires_grad_(False)
    modules.replace_rms_norms(model)
    with modules.single_rotary(model, max_positions):
        yield model


def trace(module: VerifierModule, shape: signatures.VerifierShape) -> ir.Model:
    """Export to an ONNX model whose weights are not read. Names and order of inputs and outputs as in the contract."""
    batch, nodes, capacity = TRACED_BATCH, TRACED_NODES, TRACED_CAPACITY
    b, t, r, c = (torch.export.Dim(name, min=low) for name, low in (("B", 1), ("T", 1), ("R", 1), ("C", 2)))
    cache = torch.zeros(batch, shape.kv_heads, capacity, shape.head_dim, dtype=TORCH[shape.dtype])
    args = (
        torch.ones(batch, nodes, dtype=torch.long),
        torch.arange(nodes).repeat(batch, 1),
        torch.ones(batch, nodes, nodes, dtype=torch.bool),
        torch.full((batch,), 3),
        torch.tensor([3 + nodes]),
        torch.zeros(batch, 3, dtype=torch.long),
        [cache.clone() for _ in range(2 * shape.layers)],
    )
    dynamic: tuple[Any, ...] = (
        {0: b, 1: t},
        {0: b, 1: t},
        {0: b, 1: t, 2: t},
        {0: b},
        {},
        {0: b, 1: r},
        [{0: b, 2: c}] * 2 * shape.layers,
    )
    outputs = signatures.verifier_outputs(shape, module.taps)
    return trace_graph(module, args, dynamic, signatures.verifier_inputs(shape), outputs)


def trace_graph(
    module: nn.Module,
    args: tuple[Any, ...],
    dynamic: tuple[Any, ...],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    translations: Mapping[Any, Any] = TRANSLATIONS,
) -> ir.Model:
    """Export any module of ours, called with `args` of which `dynamic` sizes vary, under the names of its contract."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = _export(
            module,
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dynamic,
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            custom_translation_table=dict(translations),
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model


def _export(module: nn.Module, args: tuple[Any, ...], **options: Any) -> torch.onnx.ONNXProgram | None:
    try:
        return torch.onnx.export(module, args, **options)
    except Exception as error:  # what stops tracing is wrapped by torch in advice that is not for our users
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RedraftError):
            cause = cause.__cause__
        if cause is None:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise UnsupportedModelError(f"torch cannot trace {_called(module)} ({reason})") from error
    raise cause from None  # here, so that it does not become the context of what it is the cause of


def _called(module: nn.Module) -> str:
    return type(getattr(module, "model", module)).__name__
