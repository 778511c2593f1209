"""A random Lyanna drafter and a random Llama, both tiny, and their graphs without the runtime."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from redraft import names
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_any, lower_chain
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.export.checkpoint import model_config
from redraft.export.checkpoint.architecture import Architecture
from redraft.export.checkpoint.loading import load_tensors
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.sources import Source
from redraft.export.checkpoint.weight_files import FOLDER, NewTensor
from redraft.export.drafters import ExportedDrafter, find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData, save_drafter
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.export.drafters.writing import Target
from redraft.export.verifier import VerifierExport
from redraft.methods.lyanna import METHOD, LyannaBuild, LyannaShape
from redraft.methods.lyanna_token_info import lookup
from redraft.names import Dtype, WeightRef
from redraft.train.objectives.lyanna import chains
from tests.engines.bundles import manifest_of
from tests.engines.drafters import LYANNA_DRAFT_SINGLE, lyanna_record
from tests.engines.graphs import Decoder
from tests.export.models import write_checkpoint

from .token_tree import Tree, build_subtree

HIDDEN, VOCABULARY, CONTEXT = 32, 61, 96
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BUILD: dict[str, object] = {"precision": "fp32", "width": 2, "nodes": 8}
M = TypeVar("M", bound=nn.Module)
CONFIG = LyannaConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=48, heads=4, kv_heads=2, head_dim=16, rank=5, steps=3,
    logit_scale=0.6, draft_logit_scale=1.3,
)  # fmt: skip


def write_verifier(folder: Path, **changes: object) -> Checkpoint:
    """A Llama with an invalid tokenizer file."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
                 max_position_embeddings=CONTEXT)  # fmt: skip
    write_checkpoint(folder, "llama", **(sizes | changes))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return Checkpoint.open(folder)


def counts(vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Each token's count; some are equal."""
    return torch.randint(0, 20, (vocabulary,), generator=torch.Generator().manual_seed(2))


def arrays(tables: Iterable[NewTensor]) -> dict[str, np.ndarray]:
    """Tables to write, as arrays, by name."""
    return {made.name: np.concatenate(list(made.slabs())) for made in tables}


def randomized(make: Callable[[], M], seed: int = 3, std: float = 0.3) -> M:
    """A module without zeros and ones, so that every weight counts, as it is stored."""
    torch.manual_seed(seed)
    module = make().eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and "norm" in name), std=std)
        parameter.copy_(parameter.bfloat16())
    return module


def random_drafter(config: LyannaConfig = CONFIG, seed: int = 0) -> LyannaDrafter:
    """A random drafter of the configuration."""
    return randomized(lambda: LyannaDrafter(config), seed)


def save(
    folder: Path, verifier: Checkpoint, method: str, module: nn.Module, config: DrafterConfig
) -> DrafterCheckpoint:
    """A drafter's folder for a verifier. A draft vocabulary has tokens at random."""
    data = token_data(config)
    save_drafter(folder, method, config, Identity.of(verifier), module, data.counts, {}, data.draft_vocabulary)
    return DrafterCheckpoint.open(folder)


def write_drafter(folder: Path, verifier: Checkpoint, config: LyannaConfig = CONFIG, seed: int = 0) -> Path:
    """A folder of a random Lyanna drafter for a verifier."""
    return save(folder, verifier, METHOD.id, random_drafter(config, seed), config).path


def token_data(config: DrafterConfig) -> TokenData:
    """Counts, and a draft vocabulary if the configuration has one, neither the lowest ids nor the most frequent."""
    drawn = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(4))[: config.draft_vocab_size]
    return TokenData(counts(config.vocab_size), drawn.sort().values if config.draft_vocab_size else None)


def last_chain(
    module: LyannaDrafter, features: torch.Tensor, tokens: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Training's hidden states [N, n] of the chain after features [T, n] and tokens [T + 1]."""
    padded, starts = F.pad(features, (0, 0, 0, 1)), torch.tensor([[len(features) - 1]])
    return torch.cat([hidden[0] for hidden in chains(module, padded[None], tokens[None], starts, embed)])


@dataclass
class Exported:
    """A drafter's graphs with its verifier's."""

    module: LyannaDrafter
    lyanna: ExportedDrafter
    embedding: torch.Tensor
    head: torch.Tensor
    bundle: Bundle

    @property
    def shape(self) -> LyannaShape:
        return self.lyanna.shape

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Token information by name, in the order of the signature."""
        return self.bundle.tables(METHOD.id)

    def chain_logits(self, features: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
        """Logits [N, H] of the chain after features [T, n] and tokens [T + 1], as in training."""
        states = last_chain(self.module, features, tokens, self.embed)
        head = self.head if self.vocabulary is None else self.head[torch.from_numpy(self.vocabulary)]
        return (F.linear(states, head) * self.module.config.logit_scale).numpy()

    @property
    def vocabulary(self) -> np.ndarray | None:
        """The token of each column of the logits; None if all tokens have columns."""
        return self.tables.get(names.DRAFT_VOCABULARY)

    def subtree(self, logits: np.ndarray, root: int, scale: float | None = None, drawn: bool = False) -> Tree:
        """The whole tree of Algorithm 1 for logits [S, H], with the drafter's tables, scale and vocabulary."""
        tables, shape = self.tables, self.shape
        scale = shape.draft_logit_scale if scale is None else scale
        return build_subtree(logits, root, lambda t: lookup(tables, t), shape.width, scale, self.vocabulary, drawn)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The verifier's embedding."""
        return F.embedding(tokens, self.embedding)

    def added(self, token: int) -> np.ndarray:
        """RMSNorm(W2 W1 E(token)), [H], which the next token's logits gain."""
        assert self.module.token_info is not None
        return self.module.token_info(self.embed(torch.tensor(token))).numpy()


@dataclass(frozen=True)
class Verifier:
    """A verifier and the folder of its weights."""

    checkpoint: Checkpoint
    folder: Path
    export: VerifierExport

    @property
    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding and the head."""
        stored = load_file(self.checkpoint.path / "model.safetensors")
        return stored[EMBEDDING], stored[HEAD]


def untraced(checkpoint: Checkpoint, hidden_states: tuple[str, ...], dtype: Dtype = "float32") -> VerifierExport:
    """The parts of an exported verifier that a drafter's export reads, without the verifier's graph and weights."""
    text = model_config.load_config(checkpoint)
    tensors = load_tensors(checkpoint, Architecture.of(text)).parameters
    shape = model_config.verifier_shape(text, None, dtype)
    source = Source(checkpoint, dict.fromkeys((EMBEDDING, HEAD), (shape.vocabulary, shape.hidden)), tensors)
    return VerifierExport(shape, hidden_states, "", (), EMBEDDING, HEAD, source)


def make_verifier(folder: Path, dtype: Dtype = "float32") -> Verifier:
    """A verifier below `folder`. In float32, its embedding and head are placed for drafters."""
    checkpoint, out = write_verifier(folder / "verifier"), folder / "graph"
    (out / FOLDER).mkdir(parents=True)
    export = untraced(checkpoint, ("last", "0"), dtype)
    if dtype == "float32":
        export = replace(export, weights=tuple(_placed(export, name, out) for name in (EMBEDDING, HEAD)))
    return Verifier(checkpoint, out, export)


def _placed(export: VerifierExport, name: str, out: Path) -> WeightRef:
    entry = export.source.stored(name)
    assert entry is not None
    return WeightRef(name, export.source.link(name, out), entry.offset, entry.length, entry.dtype, entry.shape)


def export(folder: Path, verifier: Verifier, config: LyannaConfig = CONFIG, **options: object) -> Exported:
    """A random drafter of this configuration, and its graphs in a copy of the verifier's folder."""
    opened, out = (
        DrafterCheckpoint.open(write_drafter(folder / "drafter", verifier.checkpoint, config)),
        folder / "graphs",
    )
    shutil.copytree(verifier.folder, out)
    target = Target(METHOD.id, verifier.export, out, LyannaBuild(**BUILD | options))
    lyanna = find_exporter(METHOD.id).trained(target, opened, Identity.of(verifier.checkpoint))
    return exported(out, verifier, lyanna, random_drafter(config))


def exported(folder: Path, verifier: Verifier, lyanna: ExportedDrafter, module: LyannaDrafter) -> Exported:
    """A drafter's graphs in `folder`, and all forms of them for the CPU."""
    return Exported(module, lyanna, *verifier.shared, Bundle(folder, manifest_with_verifier(folder, verifier, lyanna)))


def manifest_with_verifier(folder: Path, verifier: Verifier, lyanna: ExportedDrafter) -> Manifest:
    """The manifest of a verifier's and a drafter's graphs in `folder`."""
    shape = lyanna.shape
    signatures = METHOD.signatures(shape)
    graphs = {role: GraphRecord(graph_file(METHOD.id, role), *signatures[role]) for role in METHOD.roles(shape)}
    for role in METHOD.roles(shape):
        lowered = lower_any(folder, graphs[role], names.drafter_graph(METHOD.id, names.batch(role)))
        assert lowered is not None
        graphs[names.batch(role)] = lowered
    if shape.dtype == "float32":
        single = lower_chain(folder, graphs[names.DRAFT], LYANNA_DRAFT_SINGLE)
        assert single is not None
        graphs[f"{names.DRAFT}{names.SINGLE}"] = single
    record = lyanna_record(shape, graphs=graphs, weights=lyanna.weights, tables=lyanna.tables)
    return replace(manifest_of(Decoder()), graphs={}, weights=verifier.export.weights, drafters={METHOD.id: record})
