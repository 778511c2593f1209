"""Map the tensors of a GGUF file to parameters of a transformers model, and undo llama.cpp's changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, last_line
from redraft.export.gguf.config import ROPE_FACTORS
from redraft.export.gguf.file import AS_FOLDER, PLAIN_TYPES, Header, Stored

EXPERTS = re.compile(r"blk\.\d+\.ffn_(?P<part>gate|up|down)_exps\.weight")


@dataclass(frozen=True)
class Parameter:
    """A parameter and the stored rows that hold it.

    shape: of the parameter.   order: the stored row of each of its rows, None if the rows are in order.
    whole: True if transformers' processor needs the whole tensor.   source: the tensor's name in the file.
    """

    name: str
    source: str
    stored: Stored
    shape: tuple[int, ...]
    order: NDArray[np.intp] | None = None
    whole: bool = False

    @property
    def as_stored(self) -> bool:
        """True if the stored bytes are the parameter unchanged."""
        return self.stored.type in PLAIN_TYPES and self.order is None and not self.whole


@dataclass(frozen=True)
class TensorMap:
    """Maps the tensors of a file to parameters of the model that its configuration describes."""

    header: Header
    config: dict[str, Any]

    @cached_property
    def processor(self) -> TensorProcessor:
        """transformers' processor for tensors of the architecture."""
        known: dict[str, Any] = TENSOR_PROCESSORS
        processor: TensorProcessor = known.get(self.header.architecture, TensorProcessor)(config=self.config)
        return processor

    def process(self, name: str, weights: NDArray[Any]) -> NDArray[Any]:
        """Return a whole tensor of the file in transformers' form."""
        with np.errstate(all="ignore"):
            done = self.processor.process(weights=weights, name=name, parsed_parameters={"tensors": {}})
        return np.asarray(done.weights)

    def parameters(self) -> dict[str, Parameter]:
        """Return every parameter that the file has, by the name that `save_pretrained` gives it.

        Raises UnsupportedModelError for a tensor that the model does not have, CheckpointError for one that is missing
        or has another shape.
        """
        model = self._empty_model()
        config, state = model.config, model.state_dict()
        # Without children: otherwise transformers maps each of the model's modules like a model, which takes minutes.
        flat = SimpleNamespace(config=model.config, state_dict=lambda: state, named_children=list)
        targets = get_gguf_hf_weights_map(flat, self.processor)
        shapes = dict(pair for name, tensor in state.items() for pair in _saved(name, tuple(tensor.shape)))
        found: dict[str, Parameter] = {}
        for stored in self.header.tensors:
            if stored.name == ROPE_FACTORS:
                continue
            target = targets.get(stored.name) or targets.get(stored.name.removesuffix(".weight"))
            for parameter in self._parameters(stored, target):
                expected = shapes.get(parameter.name)
                if parameter.shape != expected:
                    raise CheckpointError(
                        f"{self.header.path}: tensor {stored.name} is {list(parameter.shape)}, the metadata require "
                        f"{'none' if expected is None else list(expected)}",
                        DOWNLOAD_AGAIN,
                    )
                found[parameter.name] = parameter
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        missing = [name for name in shapes if name not in found and name not in tied]
        if missing:
            raise CheckpointError(f"{self.header.path} has no tensor for {missing[0]}", DOWNLOAD_AGAIN)
        return found

    def _empty_model(self) -> Any:
        """Return the model without values. Raises CheckpointError if sizes of the metadata do not fit each other."""
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    CONFIG_MAPPING[self.config["model_type"]].from_dict(dict(self.config))
                )
        except Exception as error:  # models raise many types
            raise CheckpointError(
                f"{self.header.path} has invalid metadata ({last_line(error)})", DOWNLOAD_AGAIN
            ) from error

    def _parameters(self, stored: Stored, target: str | None) -> Iterator[Parameter]:
        if target is None:
            raise UnsupportedModelError(
                f"{self.header.path}: a {self.config['model_type']} model has no parameter for tensor {stored.name}",
                AS_FOLDER,
            )
        if experts := EXPERTS.fullmatch(stored.name):
            count, *shape = stored.shape
            length = stored.length // count
            for index in range(count):
                rows = replace(stored, shape=tuple(shape), offset=stored.offset + index * length, length=length)
                yield Parameter(_expert(target, index, experts["part"]), stored.name, rows, rows.shape)
            return
        order, whole = self._order(stored)
        shape_there = (
            self.process(stored.name, np.broadcast_to(np.float32(1), stored.shape)).shape if whole else stored.shape
        )
        yield Parameter(target, stored.name, stored, shape_there, order, whole)

    def _order(self, stored: Stored) -> tuple[NDArray[np.intp] | None, bool]:
        """Return the processor's order of rows, and True if it does more than reorder them.

        It runs the processor on a tensor of row numbers.
        """
        rows = stored.shape[0] if stored.shape else 1
        probe = np.arange(rows, dtype=np.float64) if len(stored.shape) < 2 else np.arange(2.0 * rows).reshape(rows, 2)
        try:
            processed = self.process(stored.name, probe)
        except ValueError:  # the processor needs the tensor's own width
            return None, True
        if np.array_equal(processed, probe):
            return None, False
        if processed.ndim < 2 or processed.shape != probe.shape or not np.array_equal(np.sort(processed, 0), probe):
            return None, True
        order = (processed[:, 0] / 2).astype(np.intp)
        return (order, False) if np.array_equal(probe[order], processed) else (None, True)


def _saved(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a parameter in the form of `save_pretrained`: separate matrices for each expert."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, shape
        return
    experts, rows, columns = shape
    parts = ("down",) if name.endswith("down_proj") else ("gate", "up")
    for index in range(experts):
        for part in parts:
            yield _expert(name, index, part), (rows // len(parts), columns)


def _expert(fused: str, index: int, part: str) -> str:
    return f"{fused.rpartition('.')[0]}.{index}.{part}_proj.weight"
