"""Resolves a build: everything that it depends on, found, parsed and checked before anything slow begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redraft.engines
import redraft.export
import redraft.methods
from redraft.assembly import tokenizers
from redraft.assembly.drafters import DrafterSettings, OpenedDrafter, drafter_digests, open_drafter, settings_of
from redraft.assembly.models import Model, find_model, find_recipe
from redraft.assembly.options import BuildRequest, choose_drafters, configurations, options_of
from redraft.assembly.preflight import check_file, check_libraries, check_room
from redraft.assembly.progress import Reporter
from redraft.config import HALVES, BuildConfig
from redraft.engines import BundleWriter
from redraft.engines.check_record import is_current
from redraft.engines.digests import DigestCache, build_key, code_digests, text_digest
from redraft.engines.manifest import Manifest, load_manifest
from redraft.engines.tensorrt.target import check_buildable
from redraft.export.checkpoint.base import AnyCheckpoint
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.gguf.checkpoint import open_checkpoint
from redraft.garbage import libraries_kept
from redraft.interrupts import interrupts_deferred
from redraft.packages import package_version

if TYPE_CHECKING:
    from redraft.engines.tensorrt.target import Tools

ENGINES = Path("build/engines")
"""The folder of bundles without a name of their own."""
TOOLS = (
    "redraft", "torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "gguf",
)  # fmt: skip
HERE = Path(__file__).resolve()
HELD_OUT = (HERE.parent / "heldout", HERE.parents[1] / "assets/tiny/heldout")
"""The folder of held-out text in an installed package and in the repository."""


@dataclass(frozen=True)
class ResolvedBuild:
    """A build that the user's input cannot stop any more. Its stages are functions of it.

    config:   with the hidden states that the drafters read.
    options:  of `redraft build`, which repeat this build.
    digests:  SHA-256 by name of the checkpoint's files.   key: digest of everything that the bundle depends on.
    texts:    held-out text by kind, for quality and calibration.   tokens: number of its tokens to measure.
    state_texts: text by kind, whose hidden states a factorized head of a drafter is fitted to.
    tools:    GPU, TensorRT and plugin, if the build is for TensorRT.
    current:  the manifest of the bundle in `out` if it is this build's. Then `drafters` is empty.
    """

    model: Model
    config: BuildConfig
    out: Path
    checkpoint: AnyCheckpoint
    options: tuple[str, ...]
    digests: Mapping[str, str]
    key: str
    texts: Mapping[str, str]
    state_texts: Mapping[str, str]
    tokens: int
    check: bool
    force: bool
    tools: Tools | None
    current: Manifest | None
    drafters: tuple[OpenedDrafter, ...] = ()

    @property
    def weights(self) -> dict[str, str]:
        """SHA-256 by name of the files with the verifier's weights."""
        return {name: self.digests[name] for name in self.checkpoint.files if name in self.digests}


@dataclass(frozen=True)
class Target:
    """A configuration that this machine can build, with its drafters' options parsed.

    tools: GPU, TensorRT and plugin, if the build is for TensorRT.
    """

    config: BuildConfig
    drafters: tuple[DrafterSettings, ...]
    tools: Tools | None

    @classmethod
    def of(cls, config: BuildConfig, tools: Tools | None) -> Target:
        """Parse a configuration's drafters, and name their methods. Raises UsageError and CheckpointError.

        Drafters without a source, which are a recipe's settings without a folder, are left out.
        """
        drafters = [drafter for drafter in config.drafters if drafter.source is not None]
        settings = tuple(settings_of(drafter, config) for drafter in drafters)
        named = tuple(replace(each, method=its.method.id) for each, its in zip(drafters, settings, strict=True))
        return cls(replace(config, drafters=named), settings, tools)


def resolve(request: BuildRequest, scratch: Path, report: Reporter) -> list[ResolvedBuild]:
    """Return a build for each precision of the request. Downloads what has to be downloaded.

    scratch: an empty folder that lasts as long as the builds.
    Raises RedraftError for everything that is wrong with the request, the checkpoint, the drafters and this machine.
    """
    check_libraries()
    recipe = find_recipe(request.model)
    configs = configurations(request, recipe.build if recipe else BuildConfig())
    tools = [check_buildable(config) for config in configs]
    drafters = choose_drafters(configs[0], request.drafters, report)
    targets = [Target.of(replace(config, drafters=drafters), its) for config, its in zip(configs, tools, strict=True)]
    shape_folder = scratch if configs[0].random_weights else None
    model = find_model(request.model, recipe, report, request.model_path, shape_folder)
    out = request.out or ENGINES / model.name
    outs = [out if len(configs) == 1 else out.with_name(f"{out.name}-{config.precision}") for config in configs]
    return [resolve_build(model, *each, request, report) for each in zip(targets, outs, strict=True)]


def resolve_build(model: Model, target: Target, out: Path, request: BuildRequest, report: Reporter) -> ResolvedBuild:
    """Return the build of a model for a target. Raises like `resolve`.

    request: its texts, tokens, `check` and `force`. A current bundle needs no PyTorch.
    """
    config = target.config
    report("reading the checkpoint")
    checkpoint = open_checkpoint(model.path, weights=not config.random_weights)
    check_file(checkpoint)
    digests = checkpoint_digests(checkpoint)
    texts, state_texts = _texts(request, config), _state_texts(target)
    parts = {
        **digests,
        **drafter_digests(target.drafters, checkpoint),
        "shape": text_digest(json.dumps(dict(model.shape), sort_keys=True)),
        "tokens": str(request.tokens),
        **({} if request.check else {"check": "skipped"}),
        **(target.tools.digests() if target.tools else {}),
        **{f"text {kind}": text_digest(text) for kind, text in texts.items()},
        **{f"state text {kind}": text_digest(text) for kind, text in state_texts.items()},
    }
    key = build_key(parts, config, tool_versions(), _code())
    current = load_manifest(out) if not request.force and is_current(out, key) else None
    build = ResolvedBuild(
        model, config, out, checkpoint, options_of(request, config), digests, key, texts, state_texts,
        request.tokens, request.check, request.force, target.tools, current,
    )  # fmt: skip
    return build if current else _with_drafters(build, target.drafters, report)


def _with_drafters(build: ResolvedBuild, settings: tuple[DrafterSettings, ...], report: Reporter) -> ResolvedBuild:
    """Return the build with its drafters. Raises RedraftError if the model, a drafter or this machine does not fit."""
    config = build.config
    check_room(build.checkpoint, config, build.out, measured=build.tokens if build.texts else 0)
    with BundleWriter(build.out, build.model.name, build.force, config.random_weights):
        pass  # nothing else may be in its place
    report("loading libraries")
    load_libraries()
    from redraft.export.checkpoint import model_config
    from redraft.export.drafters.checkpoint import Identity

    architecture = model_config.load_config(build.checkpoint)
    model_config.check_shape(architecture, build.model.shape, build.model.source)
    identity = Identity.from_digests(build.checkpoint, build.digests)
    drafters = tuple(open_drafter(drafter, build.checkpoint, identity, config) for drafter in settings)
    wanted = {state for drafter in drafters for state in drafter.hidden_states} - set(config.hidden_states)
    config = replace(config, hidden_states=(*config.hidden_states, *sorted(wanted)))
    return replace(build, config=config, drafters=drafters)


def _texts(request: BuildRequest, config: BuildConfig) -> Mapping[str, str]:
    """Return the held-out texts to measure on.

    By default, builds in fp16, bf16 or for TensorRT get no text: their models may be too large for the fp32 engines to
    compare with.
    """
    if config.random_weights or (request.texts is None and (config.precision in HALVES or config.for_tensorrt)):
        return {}
    return _own_texts() if request.texts is None else request.texts


def _state_texts(target: Target) -> Mapping[str, str]:
    """Return redraft's own texts if a drafter's head is factorized, else none. Random weights have no states."""
    factorized = any(drafter.options.head_rank for drafter in target.drafters)
    return _own_texts() if factorized and not target.config.random_weights else {}


def _own_texts() -> dict[str, str]:
    return {kind: path.read_text(encoding="utf-8") for kind, path in held_out_texts().items()}


def held_out_texts() -> dict[str, Path]:
    """Return redraft's own held-out text by kind."""
    return {path.stem: path for folder in HELD_OUT for path in sorted(folder.glob("*.txt"))}


def checkpoint_digests(checkpoint: AnyCheckpoint) -> dict[str, str]:
    """Return the SHA-256 by name of every file of the checkpoint that a build reads."""
    of_folder = isinstance(checkpoint, Checkpoint)
    text_files = ("config.json", *tokenizers.text_files(checkpoint.path)) if of_folder else ()
    listed = (*text_files, *checkpoint.files)
    paths = {name: checkpoint.path / name for name in listed if (checkpoint.path / name).is_file()}
    found = DigestCache().digests(paths.values())
    return {name: found[path] for name, path in paths.items()}


def tool_versions() -> dict[str, str]:
    """Return the versions of the packages that write a bundle."""
    return {name: package_version(name) or "none" for name in TOOLS}


def _code() -> dict[str, str]:
    packages = (redraft.methods, redraft.engines, redraft.export)
    folders: list[Any] = [HERE.parent, *(Path(str(package.__file__)).resolve().parent for package in packages)]
    return code_digests(*folders)


def load_libraries() -> None:
    """Import PyTorch and its users, which takes a second or two and must not be interrupted."""
    if "redraft.export.verifier" in sys.modules:
        return
    with interrupts_deferred(), libraries_kept():
        import redraft.export.verifier
        import redraft.export.weights  # noqa: F401
