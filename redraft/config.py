"""Configuration that a recipe file, the command line and Python all build: frozen, validated, unknown keys refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from redraft.errors import UsageError
from redraft.methods import NONE, UNBUILT
from redraft.names import Precision as Precision

ROUNDED_BY_PRODUCT: tuple[Precision, ...] = ("int8", "int4")
"""Precisions whose products ONNX Runtime rounds."""
WEIGHT_ONLY: tuple[Precision, ...] = ("int8", "int4", "fp8")
HALVES: tuple[Precision, ...] = ("fp16", "bf16")
Backend = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
NATIVE_RELEASES = "10.15 or newer, except 11.1 and 11.2"
"""Releases of TensorRT whose own layers compute tree attention correctly."""
DRAFTER_ID = re.compile(r"[A-Za-z0-9_-]+")
"""Form of a drafter's id. It has no dot and no plus, which join ids to other words."""
RESERVED_IDS = (
    NONE, *UNBUILT, "all", "random", "native", "inexact", "verifier", "step", "weights", "prediction", "constraint",
)  # fmt: skip
"""Words that cannot be ids: the command line, names of a bundle's graphs, or the controller use them."""
RANDOM = "random"
"""Replaces a drafter's folder: a drafter of the verifier's shape with random weights, for latency work only."""
NATIVE = "native"
"""Replaces a drafter's folder: the drafter inside of the verifier's own checkpoint."""


@dataclass(frozen=True)
class DrafterBuild:
    """Configuration of one drafter of a bundle.

    id:      the user's name for the drafter.
    source:  the drafter's folder, a draft model's folder or GGUF file, RANDOM or NATIVE. None in a recipe that leaves
             it to the command line.
    method:  the drafting method; None takes the one that the folder's configuration names.
    options: the method's own options for building.
    extra:   a recipe's drafter that is built only if the command line names it.
    """

    id: str
    source: str | None = None
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: bool = False

    def __post_init__(self) -> None:
        if not DRAFTER_ID.fullmatch(self.id):
            raise UsageError(f"no drafter can have the id {self.id!r}", "take letters, digits, - and _")
        if self.id in RESERVED_IDS:
            raise UsageError(f"no drafter can have the id {self.id!r}, which means something else", "choose another id")
        if self.source == "":
            raise UsageError(f"drafter {self.id}: source must name a folder, not ''")


@dataclass(frozen=True)
class TensorRtBuild:
    """Configuration of TensorRT engines; nothing else reads it.

    attention:     computes `redraft::TreeAttention`: our plugin, or TensorRT's own layers (NATIVE_RELEASES).
    embed_plugin:  make the plugin's library part of the engines instead of a file next to them.
    batch:         largest number of sequences in one call.
    tree_nodes:    largest number of nodes in a tree, its root included.
    prefill:       largest number of prompt tokens in one call.
    ignore_memory: build even if the free memory of the GPU or the host seems too little.
    compute_capability: that of the GPUs to build for, such as 8.9; only TensorRT for RTX builds for others than the one
                   here.
    """

    attention: Literal["plugin", "native"] = "plugin"
    embed_plugin: bool = False
    batch: int = 1
    tree_nodes: int = 64
    prefill: int = 128
    ignore_memory: bool = False
    compute_capability: str = ""

    def __post_init__(self) -> None:
        if self.embed_plugin and self.attention == "native":
            raise UsageError("--attention native uses no plugin that could be embedded", "leave --embed-plugin out")
        for name, least in (("batch", 1), ("tree_nodes", 2), ("prefill", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"tensorrt.{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class BuildConfig:
    """Configuration of a bundle that is built from a checkpoint.

    drafters:        drafters of the bundle.
    precision:       precision of the matrix products: fp32, or weight-only int8 or int4.
    backend:         the library that runs the engines.
    max_model_len:   largest number of tokens in a sequence; None takes the model's own limit.
    hidden_states:   the verifier's hidden states that drafters read (`last`, or a layer number).
    random_weights:  use the checkpoint's shapes with random weights, for latency work only.
    tensorrt:        configuration of engines of the backend tensorrt.
    kv:              precision of the verifier's keys and values on CPUs; None takes `compute_dtype`.
    target:          largest rise of perplexity of an int8 or int4 bundle, as a share; None takes the precision's own.
    bits:            4, 8 or 32 by pattern of weights' names, for products of int8 and int4 bundles.
    """

    precision: Precision = "fp32"
    backend: Backend = "onnxruntime"
    max_model_len: int | None = None
    hidden_states: tuple[str, ...] = ()
    random_weights: bool = False
    drafters: tuple[DrafterBuild, ...] = ()
    tensorrt: TensorRtBuild = TensorRtBuild()
    kv: Literal["fp16"] | None = None
    target: float | None = None
    bits: tuple[tuple[str, int], ...] = ()

    @property
    def compute_dtype(self) -> Precision:
        """Precision of all but weight-only quantized weights: fp32 on ONNX Runtime's CPU, fp16 in TensorRT."""
        if self.precision not in WEIGHT_ONLY:
            return self.precision
        return "fp16" if self.for_tensorrt else "fp32"

    @property
    def for_tensorrt(self) -> bool:
        """True for engines of TensorRT or of TensorRT for RTX."""
        return self.backend != "onnxruntime"

    @property
    def rounds_products(self) -> bool:
        """True if ONNX Runtime rounds the products, so that each may have bits of its own."""
        return self.precision in ROUNDED_BY_PRODUCT and self.backend == "onnxruntime"

    @property
    def weight_only(self) -> Literal["int8", "int4", "fp8"] | None:
        """Weight type of TensorRT's DequantizeLinear, or None for ONNX Runtime, which has another operator."""
        kinds: dict[str, Literal["int8", "int4", "fp8"]] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
        return kinds.get(self.precision) if self.for_tensorrt else None

    def __post_init__(self) -> None:
        if self.precision == "fp8" and not self.for_tensorrt:
            raise UsageError("fp8 weights are for TensorRT engines", "give --backend tensorrt, or --precision int8")
        if self.kv and self.for_tensorrt:
            raise UsageError(
                f"kv={self.kv} is for CPUs: engines of {self.backend} have keys and values of their own type",
                "leave kv= out",
            )
        if self.kv and self.precision in HALVES:
            raise UsageError(f"{self.precision} bundles have keys and values in {self.precision}", "leave kv= out")
        if (self.target is not None or self.bits) and not self.rounds_products:
            raise UsageError(
                f"{self.precision} of the backend {self.backend} has no target and no bits by weight",
                "give int8 or int4 of the backend onnxruntime",
            )
        ids = [drafter.id for drafter in self.drafters]
        if twice := next((name for name in ids if ids.count(name) > 1), None):
            raise UsageError(f"two drafters have the id {twice!r}", "give each its own: --drafter ID=DIR")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(f"context must be at least 2 tokens, not {self.max_model_len}", "raise --max-model-len")
