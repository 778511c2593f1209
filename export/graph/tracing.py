"""One forward pass of a Hugging Face decoder as a graph: token tree in, logits, features and updated KV buffers out.

The architecture's own code runs; its attention, cache and mask go through transformers' interfaces to `TreeAttention`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import TracedOnnxFunction
from torch import nn
from transformers.initialization import no_init_weights

from redraft import names, signatures
from redraft.errors import RedraftError, UnsupportedModelError
from redraft.export.checkpoint.architecture import DECODERS_ONLY, Architecture
from redraft.export.graph import experts, modules, noise, own_attention, tree_attention
from redraft.export.graph.attention import CURRENT, INTERFACE, LayerRecorder
from redraft.export.graph.traced_pass import TracedPass
from redraft.names import Dtype, TensorSpec

OPSET = 24
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TRACED_NODES = 4
TRACED_BATCH = 2
TRACED_KV_ROWS = 16


@torch.library.custom_op("redraft::gather_rows", mutates_args=())
def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select row `rows[b, r]` of each sequence: x [B, T, n], rows [B, R] -> [B, R, n]."""
    return torch.gather(x, 1, rows[..., None].expand(-1, -1, x.shape[2]))


gather_rows.register_fake(lambda x, rows: x.new_empty(*rows.shape, x.shape[2]))


def emit_gather_rows(x: Any, rows: Any) -> Any:
    """Translate for `torch.onnx.export`: copy whole rows."""
    return op.GatherND(x, op.Unsqueeze(rows, op.Constant(value_ints=[-1])), batch_dims=1)


@torch.library.custom_op("redraft::take", mutates_args=())
def take(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the entries of values [N] at indices of any shape, in that shape."""
    return values[indices]


take.register_fake(lambda values, indices: values.new_empty(indices.shape))


def emit_take(values: Any, indices: Any) -> Any:
    """Translate for `torch.onnx.export`: one node, whatever the shape of the indices."""
    return op.Gather(values, indices)


TRANSLATIONS = {
    torch.ops.redraft.tree_attention.default: tree_attention.emit,
    torch.ops.redraft.rms_norm.default: modules.emit_rms_norm,
    torch.ops.redraft.rotary.default: modules.emit_rotary,
    torch.ops.redraft.gather_rows.default: emit_gather_rows,
    torch.ops.redraft.take.default: emit_take,
    torch.ops.redraft.add_noise.default: noise.emit_add_noise,
}


class VerifierModule(nn.Module):
    """A model with the graph's signature: inputs and outputs in the order of `redraft.signatures`."""

    def __init__(self, model: nn.Module, hidden_states: tuple[str, ...], recorded: LayerRecorder) -> None:
        super().__init__()
        self.model = model
        self.hidden_states = hidden_states
        self.__dict__["recorded"] = recorded
        model.get_output_embeddings().register_forward_pre_hook(_wanted_rows)  # type: ignore[operator]
        for hidden_state in hidden_states:
            _with_hidden_states(model, hidden_state).register_forward_hook(_collect(hidden_state))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tree_mask: torch.Tensor,
        cache_len: torch.Tensor,
        kv_len: torch.Tensor,
        output_rows: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Run the model. Shapes are those of `redraft.signatures.verifier_inputs` and `verifier_outputs`."""
        recorded: LayerRecorder = self.__dict__["recorded"]
        current = TracedPass(
            recorded.layers, recorded.order, tree_mask, positions, cache_len, kv_len, caches, output_rows
        )
        with current.running():
            logits = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).logits.float()
        presents = [cache for layer in sorted(current.presents) for cache in current.presents[layer]]
        return (logits, *(current.features[hidden_state] for hidden_state in self.hidden_states), *presents)


def _traced() -> TracedPass:
    current = CURRENT.get()
    assert isinstance(current, TracedPass)
    return current


def _with_hidden_states(model: nn.Module, hidden_state: str) -> nn.Module:
    """Return the module whose output is the feature `hidden_state`: a layer, or the final norm."""
    decoder: Any = model.base_model
    candidates = (
        getattr(decoder, "norm", None) if hidden_state == names.LAST_HIDDEN_STATE else getattr(decoder, "layers", None)
    )
    if candidates is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no layers of known names: no feature {hidden_state!r}")
    module: nn.Module = candidates if hidden_state == names.LAST_HIDDEN_STATE else candidates[int(hidden_state)]
    return module


def _wanted_rows(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    rows = _traced().output_rows
    assert rows is not None
    return (gather_rows(args[0], rows), *args[1:])


def _collect(hidden_state: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        _traced().features[hidden_state] = output if isinstance(output, torch.Tensor) else output[0]

    return hook


@contextmanager
def empty_model(architecture: Architecture, max_positions: int, dtype: Dtype = "float32") -> Iterator[nn.Module]:
    """Return the text model with single operators and with uninitialized weights, whose pages are never touched."""
    own_attention.register(architecture.text.model_type)
    with no_init_weights():
        try:
            model: Any = architecture.text_class._from_config(
                architecture.text, attn_implementation=INTERFACE, dtype=TORCH[dtype]
            ).eval()
        except KeyError as error:
            if INTERFACE not in str(error):
                raise
            name = architecture.text_class.__name__
            raise UnsupportedModelError(f"{name} allows only its own attention", DECODERS_ONLY) from None
        model.tie_weights()
        own_attention.replace(model)
        experts.unroll_experts(model)
    model.requires_grad_(False)
    modules.replace_rms_norms(model)
    modules.fix_rotary_lengths(model)
    with modules.single_rotary(model, max_positions):
        yield model


def trace(module: VerifierModule, shape: signatures.VerifierShape) -> ir.Model:
    """Export to an ONNX model without reading weights. Inputs and outputs have the signature's names and order."""
    b, t, r, c = (torch.export.Dim(name, min=low) for name, low in (("B", 1), ("T", 1), ("R", 1), ("C", 2)))
    args, dynamic = decoder_arguments(shape, b, t, r, c)
    outputs = signatures.verifier_outputs(shape, module.hidden_states)
    return trace_graph(module, args, dynamic, signatures.verifier_inputs(shape), outputs)


def decoder_arguments(
    shape: signatures.VerifierShape, b: Any, t: Any, r: Any, c: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return arguments of `VerifierModule.forward` to trace with, and their sizes that vary, by four symbols."""
    batch, nodes, kv_rows = TRACED_BATCH, TRACED_NODES, TRACED_KV_ROWS
    cache = torch.zeros(batch, shape.kv_heads, kv_rows, shape.head_dim, dtype=TORCH[shape.dtype])
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
    return args, dynamic


def trace_graph(
    module: nn.Module,
    args: tuple[Any, ...],
    dynamic: tuple[Any, ...],
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    translations: Mapping[Any, Any] = TRANSLATIONS,
) -> ir.Model:
    """Export a module of redraft, called with `args` whose `dynamic` sizes vary, with the names of its signature."""
    with warnings.catch_warnings(), torch.no_grad(), _operators_parsed_once():
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
    _name_sizes(program.model, inputs)
    return program.model


def _name_sizes(model: ir.Model, inputs: tuple[TensorSpec, ...]) -> None:
    """Give sizes that vary the signature's symbols. torch has its own if the first argument is a list of tensors."""
    shapes = {str(value.name): value.shape for value in model.graph.inputs}
    own: dict[str, str] = {}
    for spec in inputs:
        for dim, size in zip(shapes.get(spec.name) or (), spec.shape, strict=False):
            if isinstance(size, str) and isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                own[dim.value] = size
    if all(dim == size for dim, size in own.items()):
        return
    named = re.compile(rf"\b({'|'.join(map(re.escape, own))})\b")
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    for shape in (value.shape for value in (*model.graph.inputs, *made) if value.shape is not None):
        for place, dim in enumerate(shape):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                shape[place] = named.sub(lambda found: own[found[0]], dim.value)


_signature_of = cache(TracedOnnxFunction.function_ir.fget)


@contextmanager
def _operators_parsed_once() -> Iterator[None]:
    """Keep parsed operators. Without it, each `torch.onnx.export` parses the sources of 500 again, a second's work."""
    of_package = TracedOnnxFunction.function_ir
    TracedOnnxFunction.function_ir = property(_signature_of)
    try:
        yield
    finally:
        TracedOnnxFunction.function_ir = of_package


def _export(module: nn.Module, args: tuple[Any, ...], **options: Any) -> torch.onnx.ONNXProgram | None:
    try:
        return torch.onnx.export(module, args, **options)
    except Exception as error:  # torch wraps the cause in advice that does not help our users
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, RedraftError):
            cause = cause.__cause__
        if cause is None:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            name = type(getattr(module, "model", module)).__name__
            raise UnsupportedModelError(f"torch cannot trace {name} ({reason})") from error
    raise cause from None  # here, so that the cause does not also become the context of the error
