"""The base of exporters: how a method's trained and random drafters become graphs, weights and tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import nn

from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.sources import AnySource
from redraft.export.checkpoint.weight_files import NewTensor
from redraft.export.drafters import ExportedDrafter
from redraft.export.drafters.checkpoint import DrafterCheckpoint, Identity, TokenData
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.layer import DrafterConfig
from redraft.export.drafters.writing import (
    Target,
    check_fit,
    empty_module,
    parameter_shapes,
    random_source,
    stem,
    trace_draft,
    write_tables,
    write_traced,
)
from redraft.export.graph import tracing
from redraft.methods import Method, Row

C = TypeVar("C", bound=DrafterConfig)


class NativeDrafter(Protocol):
    """A drafter inside of a verifier's checkpoint."""

    @property
    def description(self) -> str:
        """One line about it."""

    @property
    def hidden_states(self) -> tuple[str, ...]:
        """The verifier's hidden states that it reads."""

    @property
    def files(self) -> tuple[str, ...]:
        """The checkpoint's files that hold it, sorted."""


class Exporter(ABC, Generic[C]):
    """Writes graphs and tables of a method's drafters. A family's module has its class as `EXPORTER`.

    A method of this class raises CheckpointError for a drafter that does not fit, and UsageError for options that do
    not.

    config: class of a drafter's configuration.   module: class of its torch module.
    """

    config: ClassVar[type[Any]]
    module: ClassVar[type[nn.Module]]

    def __init__(self, method: Method[Any], row: Row) -> None:
        self.method, self.row = method, row

    def configure(self, drafter: DrafterCheckpoint, options: Any) -> C:
        """Return the drafter's configuration. It needs no verifier, so a build calls it first."""
        config: C = drafter.configure(self.config)
        return config

    def trained(self, target: Target, drafter: DrafterCheckpoint, identity: Identity) -> ExportedDrafter:
        """Write a trained drafter. Raises CheckpointError if it is not this verifier's, or does not load."""
        config = self.configure(drafter, target.options)
        check_fit(drafter, config, target.verifier, identity)
        module = self.empty(config, target)
        source, tokens = drafter.open_weights(parameter_shapes(module), stem(target.name))
        return self.write(target, config, module, source, tokens)

    @abstractmethod
    def random(self, target: Target, verifier: Any) -> ExportedDrafter:
        """Write a drafter with random weights for a verifier of this transformers configuration."""

    @abstractmethod
    def write(
        self, target: Target, config: C, module: nn.Module, source: AnySource, tokens: TokenData
    ) -> ExportedDrafter:
        """Write graphs, weights and tables of a drafter.   source: of the module's parameters."""

    def checkpoint(self, target: Target, checkpoint: AnyCheckpoint) -> ExportedDrafter:
        """Write a drafter that is a plain checkpoint of a decoder, if the method takes such ones."""
        raise NotImplementedError

    def find_native(self, checkpoint: AnyCheckpoint) -> NativeDrafter:
        """Return the drafter inside of a verifier's checkpoint, if the method has such ones."""
        raise NotImplementedError

    def native(self, target: Target, checkpoint: AnyCheckpoint) -> ExportedDrafter:
        """Write the drafter inside of the verifier's own checkpoint, if the method has such ones."""
        raise NotImplementedError

    def empty(self, config: C, target: Target) -> nn.Module:
        """Return the module with uninitialized weights of the verifier's element type."""
        return empty_module(lambda: self.module(config), target.dtype)


class DraftExporter(Exporter[C]):
    """Writes drafters with one draft graph, whose module a subclass wraps.

    logits:       output of the product with the head, which keeps the verifier's precision; "" for none.
    translations: of the graph's operators to ONNX.
    """

    logits: ClassVar[str] = ""
    translations: ClassVar[Mapping[Any, Any]] = tracing.TRANSLATIONS

    @abstractmethod
    def random_config(self, target: Target, verifier: Any) -> C:
        """Return the configuration of a random drafter for a verifier of this transformers configuration."""

    @abstractmethod
    def shape(self, target: Target, config: C) -> Any:
        """Return the sizes of the graphs."""

    @abstractmethod
    def graph(self, target: Target, module: Any, shape: Any) -> nn.Module:
        """Return the draft graph's computation."""

    def sizes(self, target: Target, config: Any) -> dict[str, Any]:
        """Return the fields that the shapes of all methods have."""
        return dict(
            hidden=config.hidden_size,
            vocabulary=config.vocab_size,
            draft_vocabulary=config.limited(target.options.draft_vocabulary),
            draft_logit_scale=config.draft_logit_scale,
            head_rank=target.options.head_rank or 0,
            dtype=target.dtype,
        )

    def random(self, target: Target, verifier: Any) -> ExportedDrafter:
        """Write a drafter with random weights for a verifier of this transformers configuration."""
        config = self.random_config(target, verifier)
        module = self.empty(config, target)
        source = random_source(target, parameter_shapes(module, stem(target.name)))
        return self.write(target, config, module, source, TokenData.uncounted(target.vocabulary))

    def write(
        self, target: Target, config: C, module: nn.Module, source: AnySource, tokens: TokenData
    ) -> ExportedDrafter:
        """Write the draft graph, its weights and its tables.   source: of the module's parameters."""
        shape = self.shape(target, config)
        vocabulary = DraftVocabulary.of(tokens, shape.draft_vocabulary)
        tables = self.tables(target, module, source, vocabulary, shape)
        target.progress("trace drafter", 0, 1)
        model = trace_draft(self.graph(target, module, shape), shape, self.method, self.translations)
        own_head = getattr(config, "own_head", False)
        own = self.columns(target, source, vocabulary)
        weights = write_traced(target, model, own, vocabulary, self.logits, own_head)
        return ExportedDrafter(shape, target.precision, weights, write_tables(target.name, tables, target.out))

    def columns(self, target: Target, source: AnySource, vocabulary: DraftVocabulary) -> AnySource:
        """Return the source with only those rows of the drafter's own matrices that the draft vocabulary has."""
        return source

    def tables(
        self, target: Target, module: nn.Module, source: AnySource, vocabulary: DraftVocabulary, shape: Any
    ) -> tuple[NewTensor, ...]:
        """Return the tables of the method's specification."""
        return vocabulary.tables()
