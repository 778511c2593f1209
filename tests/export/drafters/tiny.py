"""A random Lyanna drafter and a random Llama, both tiny, and their graphs without the runtime."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

from redraft import names
from redraft.config import BuildConfig, Precision
from redraft.engines.bundle import Bundle
from redraft.engines.lowering import lower_any, lower_chain
from redraft.engines.manifest import GraphRecord, Manifest
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.checkpoint.weight_files import NewTensor
from redraft.export.drafters import ExportedDrafter, find_exporter, graph_file
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData, save_drafter
from redraft.export.drafters.layer import LayerConfig
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.export.drafters.writing import Target
from redraft.export.verifier import VerifierExport
from redraft.methods.lyanna import METHOD, LyannaBuild, LyannaShape
from redraft.methods.lyanna_token_info import lookup
from redraft.train.objectives.lyanna import chains
from tests.engines.bundles import manifest_of
from tests.engines.drafters import LYANNA_DRAFT_SINGLE, lyanna_record
from tests.engines.graphs import Decoder
from tests.export.models import export_verifier, write_checkpoint

from .token_tree import Tree, build_subtree

HIDDEN, VOCABULARY, CONTEXT = 32, 61, 96
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


def random_drafter(config: LyannaConfig = CONFIG, seed: int = 0) -> LyannaDrafter:
    """A drafter without zeros and ones, so that every path counts."""
    torch.manual_seed(seed)
    drafter = LyannaDrafter(config).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return drafter


def write_drafter(folder: Path, verifier: Checkpoint, config: LyannaConfig = CONFIG, seed: int = 0) -> Path:
    """A drafter's folder for `verifier`. A draft vocabulary has tokens at random."""
    module = random_drafter(config, seed)
    data = token_data(config)
    save_drafter(folder, "lyanna", config, Identity.of(verifier), module, data.counts, {}, data.draft_vocabulary)
    return folder


def token_data(config: LayerConfig) -> TokenData:
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
    """A verifier and the folder of its graph."""

    checkpoint: Checkpoint
    folder: Path
    export: VerifierExport


def make_verifier(folder: Path, precision: Precision = "fp32") -> Verifier:
    """A verifier and its graph below `folder`."""
    checkpoint = write_verifier(folder / "verifier")
    (folder / "graph").mkdir()
    config = BuildConfig(precision=precision, hidden_states=("last", "0"))
    return Verifier(checkpoint, folder / "graph", export_verifier(checkpoint, folder / "graph", config))


def export(folder: Path, verifier: Verifier, config: LyannaConfig = CONFIG, **options: object) -> Exported:
    """A random drafter of this configuration, and its graphs in a copy of the verifier's folder."""
    drafter = write_drafter(folder / "drafter", verifier.checkpoint, config)
    shutil.copytree(verifier.folder, folder / "graphs")
    opened = DrafterCheckpoint.open(drafter)
    build = LyannaBuild(**{"precision": "fp32", "width": 2, "nodes": 8, **options})
    target = Target(METHOD.id, verifier.export, folder / "graphs", build)
    lyanna = find_exporter(METHOD.id).trained(target, opened, Identity.of(verifier.checkpoint))
    module = LyannaDrafter(opened.configure(LyannaConfig)).eval().requires_grad_(False)
    opened.load(module)
    manifest = manifest_with_verifier(folder / "graphs", verifier, lyanna)
    stored = load_file(verifier.checkpoint.path / "model.safetensors")
    weights = (torch.from_numpy(stored[name]) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return Exported(module, lyanna, *weights, Bundle(folder / "graphs", manifest))


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
