"""The draft graph of a multi-token-prediction module inside of a verifier's checkpoint.

    h_{i+1} = N(Layer(P [N_E(E(y_i)) ; N_h(h_i)])),   y_{i+1} = argmax M h_{i+1}

transformers' model of the verifier's architecture, with one layer, computes the layer through the interfaces that the
verifier's export uses. So the module may have any layer that redraft exports, with its own norms, rotation, gates and
experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from redraft import names
from redraft.errors import UnsupportedModelError
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.loading import fill_buffers
from redraft.export.checkpoint.sources import Source
from redraft.export.checkpoint.stored_tensor import StoredTensor
from redraft.export.drafters import ExportedDrafter
from redraft.export.drafters.checkpoint import TokenData
from redraft.export.drafters.draft_graph import ChainRows, TokenChain
from redraft.export.drafters.draft_vocabulary import DraftVocabulary, check_counted
from redraft.export.drafters.layer import DrafterConfig, Keep, all_rows
from redraft.export.drafters.mtp_modules import Layout, LoadedModule, load_module
from redraft.export.drafters.writing import Target, stem, trace_draft, write_traced
from redraft.export.graph import decoder, tracing
from redraft.export.graph.attention import CURRENT, LayerRecorder, record_layers
from redraft.export.graph.experts import expert_tensors
from redraft.export.graph.traced_pass import TracedPass
from redraft.methods import Method
from redraft.methods.mtp import MtpShape


def export_native(target: Target, checkpoint: AnyCheckpoint, method: Method[MtpShape]) -> ExportedDrafter:
    """Write the graph of the module inside of the verifier's own checkpoint. Raises like `load_module`."""
    check_counted(target.name, target.options.draft_vocabulary, "a checkpoint's module")
    module, sizes = load_module(checkpoint), target.verifier.shape
    rows = sizes.max_positions + names.CATCH_UP_ROWS + target.options.steps
    target.progress("trace drafter", 0, 1)
    with tracing.empty_model(module.architecture, rows, sizes.dtype) as network:
        fill_buffers(network, module.loaded.buffers, module.checkpoint)
        recorded = record_layers(network, rows)
        shape = _shape(module, recorded, target)
        tensors = _tensors(network, module)
        drafter = NativeMtp(network, module.found.layout)
        graph = _NativeDraft(drafter, recorded, _config(module, target), shape, sizes.max_positions)
        model = trace_draft(graph, shape, method)
        vocabulary = DraftVocabulary.of(TokenData.uncounted(sizes.vocabulary), sizes.vocabulary)
        weights = write_traced(target, model, _source(target.name, drafter, tensors, module), vocabulary)
    return ExportedDrafter(shape, target.precision, weights, ())


def _shape(module: LoadedModule, recorded: LayerRecorder, target: Target) -> MtpShape:
    text, sizes = module.architecture.text, target.verifier.shape
    found = decoder.with_layers(model_config.verifier_shape(text, None, sizes.dtype), text, recorded.layers)
    return MtpShape(
        hidden=sizes.hidden,
        vocabulary=sizes.vocabulary,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        steps=target.options.steps,
        draft_vocabulary=sizes.vocabulary,
        head_rank=target.options.head_rank or 0,
        dtype=sizes.dtype,
        hidden_states=module.found.hidden_states,
    )


def _config(module: LoadedModule, target: Target) -> DrafterConfig:
    sizes, scale = target.verifier.shape, model_config.logit_scale(module.architecture.text)
    return DrafterConfig(hidden_size=sizes.hidden, vocab_size=sizes.vocabulary, logit_scale=scale)


def _tensors(network: nn.Module, module: LoadedModule) -> dict[str, StoredTensor]:
    """Return the stored tensors of the parameters of `NativeMtp`, and of the parts of `network` that it drops."""
    stored = module.loaded.parameters
    layer = {**stored, **expert_tensors(network, stored)}
    return {**module.parts, **{f"network.{parameter}": tensor for parameter, tensor in layer.items()}}


def _source(name: str, drafter: nn.Module, tensors: Mapping[str, StoredTensor], module: LoadedModule) -> Source:
    """Return the source of the drafter's parameters, by their names in a bundle."""
    shapes = {parameter: tuple(value.shape) for parameter, value in drafter.named_parameters()}
    return Source(
        module.checkpoint,
        {f"{stem(name)}{parameter}": shape for parameter, shape in shapes.items()},
        {f"{stem(name)}{parameter}": tensors[parameter] for parameter in shapes},
        stem(name),
    )


class NativeMtp(nn.Module):
    """A module inside of a checkpoint: transformers' model of one layer, between norms and a projection."""

    def __init__(self, network: Any, layout: Layout) -> None:
        """Takes the layer out of `network`, whose embedding, final norm and head are replaced.

        Raises UnsupportedModelError if the model changes embeddings before its first layer.
        """
        super().__init__()
        body, weight = network.base_model, network.get_input_embeddings().weight
        width = weight.shape[1]
        self.layout = layout
        norms: list[nn.Module] = [copy.deepcopy(body.norm) for _ in range(3)]
        self.embedding_norm, self.hidden_norm, self.norm = norms
        with torch.device("meta"):
            projection = nn.Linear(2 * width, width, bias=False, dtype=weight.dtype)
        self.projection = projection.to_empty(device="cpu").requires_grad_(False)
        body.norm = nn.Identity()
        network.set_input_embeddings(nn.Identity())
        network.set_output_embeddings(nn.Identity())
        _check_inputs(network, torch.linspace(-1, 1, width, dtype=weight.dtype)[None, None])
        self.network = network

    def forward(
        self, hidden: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, attend: TracedPass,
        keep: Keep = all_rows,
    ) -> torch.Tensor:  # fmt: skip
        """Return the next hidden states from states [B, T, n] at `positions` and embeddings of the next tokens."""
        pair = self.embedding_norm(embeddings), self.hidden_norm(hidden)
        fused = self.projection(torch.cat(pair[::-1] if self.layout.hidden_first else pair, dim=-1))
        with attend.running():
            out = self.network.base_model(inputs_embeds=fused, position_ids=positions, use_cache=False)
        attend.caches[:] = attend.presents[0]
        state: torch.Tensor = keep(out.last_hidden_state)
        return self._normed(state) if self.layout.normed else state

    def readout(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of hidden states: those after the module's last norm."""
        return hidden if self.layout.normed else self._normed(hidden)

    def _normed(self, state: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(state)
        return normed


class BlockRows(ChainRows[TracedPass]):
    """Rows of a draft whose attention is a forward pass of transformers' model."""

    def __init__(self, recorded: LayerRecorder, *rows: Any) -> None:
        """recorded: how the layer attends.   rows: the arguments of `DraftRows`."""
        super().__init__(*rows)
        self._recorded = recorded

    def _at(
        self, places: torch.Tensor, mask: torch.Tensor, cache_len: torch.Tensor, kv_len: torch.Tensor | None = None
    ) -> TracedPass:
        layers, order = self._recorded.layers, self._recorded.order
        kv_len = self._kv_len if kv_len is None else kv_len
        return TracedPass(layers, order, mask, places, cache_len, kv_len, self.caches)


def _check_inputs(network: Any, given: torch.Tensor) -> None:
    """Raise UnsupportedModelError if a model without layers does not return `given` embeddings [1, 1, n]."""
    body = network.base_model
    layers, body.layers = body.layers, nn.ModuleList()
    token = CURRENT.set(LayerRecorder(1))
    try:
        with torch.no_grad():
            found = body(inputs_embeds=given, position_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    finally:
        CURRENT.reset(token)
        body.layers = layers
    if not torch.equal(found.last_hidden_state, given):
        raise UnsupportedModelError(
            f"{type(network).__name__} changes embeddings before its first layer, which its module does not"
        )


class _NativeDraft(TokenChain[NativeMtp]):
    """The draft of a module inside of the verifier's checkpoint."""

    def __init__(self, drafter: NativeMtp, recorded: LayerRecorder, *arguments: Any) -> None:
        super().__init__(drafter, *arguments)
        self.__dict__["recorded"] = recorded

    def _prepare(self, drafter: NativeMtp, positions: int) -> None:
        """Change nothing: transformers' model has single operators already."""

    def rows(self, *rows: Any) -> ChainRows[Any]:
        """Attend as transformers' model does."""
        return BlockRows(self.__dict__["recorded"], *rows)
