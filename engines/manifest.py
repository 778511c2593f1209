"""The manifest of an engine bundle: all data for opening it, as one JSON file."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from redraft.config import Backend, Precision
from redraft.engines.digests import text_digest
from redraft.engines.tensorrt_records import TensorRtRecord
from redraft.errors import BundleError, UsageError
from redraft.methods.base import TREE, Rows, TreeLimits
from redraft.names import TOKEN_IDS, VERIFIER, TensorSpec, WeightRef, drafter_graph
from redraft.records import from_plain, to_plain
from redraft.signatures import VerifierShape

SCHEMA_VERSION = 11
MANIFEST = "manifest.json"
_DIGEST = "sha256"


@dataclass(frozen=True)
class ModelIdentity:
    """The checkpoint that a bundle was built from.

    source:  the user's name for it: a recipe, a directory or a Hub id.
    weights: SHA-256 of every weight file of the checkpoint, by file name.
    random_weights: True if the verifier's weights are random.   random_drafters: names of drafters with random weights.
    stand_in_tokenizer: True if the tokenizer is not the model's, but has a token for each byte.
    inexact: a sentence for each other part of the checkpoint that the bundle stores in another form.
    """

    source: str
    architecture: str
    weights: Mapping[str, str]
    random_weights: bool = False
    random_drafters: tuple[str, ...] = ()
    stand_in_tokenizer: bool = False
    inexact: tuple[str, ...] = ()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Warnings for every output of the bundle."""
        random = [*(["the verifier"] if self.random_weights else []), *self.random_drafters]
        warnings = {
            f"random weights ({', '.join(random)}): speeds are real, texts and acceptance are not": bool(random),
            "stand-in tokenizer: a token a byte, ids above 255 in words": self.stand_in_tokenizer,
        }
        return (*(caveat for caveat, true in warnings.items() if true), *self.inexact)


@dataclass(frozen=True)
class Quality:
    """The quality of a bundle's verifier on held-out text, by kind of text, next to transformers' model in fp32.

    divergence:   mean Kullback-Leibler divergence of the verifier's distributions from those in fp32, in nats a token.
    same_tokens:  share of positions with the same likeliest next token.
    error:        standard error of the logarithm of perplexity over perplexity_fp32.
    tokens:       tokens of each kind.
    """

    perplexity: Mapping[str, float]
    perplexity_fp32: Mapping[str, float]
    divergence: Mapping[str, float] = field(default_factory=dict)
    same_tokens: Mapping[str, float] = field(default_factory=dict)
    error: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0


@dataclass(frozen=True)
class GraphRecord:
    """One graph: its file and its signature."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True)
class DrafterRecord:
    """One drafter of a bundle.

    method:           its drafting method, whose specification reads `shape`.
    verifier_digest:  `verifier_digest` of the weights that it was built for.
    hidden_states:    the verifier's, for the drafter to read.   rows: all rows of a call, the last row, or none.
    graphs:           by role.   weights: of its graphs.   tables: inputs bound once.
    state:            tensors of a slot.
    limits:           its largest tree.
    """

    method: str
    verifier_digest: str
    precision: Precision
    hidden_states: tuple[str, ...]
    rows: Rows
    graphs: Mapping[str, GraphRecord]
    state: tuple[TensorSpec, ...]
    limits: TreeLimits
    shape: Mapping[str, Any]
    weights: tuple[WeightRef, ...] = ()
    tables: tuple[WeightRef, ...] = ()

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all tables."""
        return sum(ref.length for ref in self.tables)


@dataclass(frozen=True)
class Manifest:
    """All data for opening a bundle. The records above describe their own fields.

    max_model_len: largest number of tokens in a sequence.   hidden_states: the verifier's outputs.
    graphs:     those of the verifier and of a step. A drafter's record has the drafter's.   drafters: by id.
    tensorrt:   engines of the backend tensorrt, built from the portable `graphs`.
    tools:      versions of the libraries that built the bundle.
    choices:    a sentence for each choice that the build made of precisions.
    options:    options of `redraft build`, to repeat the command.
    build_key:  digest of everything the build depends on (`digests.build_key`).
    files:      every file of the bundle except the manifest, set when the bundle is committed.
    """

    name: str
    model: ModelIdentity
    backend: Backend
    backend_version: str
    precision: Precision
    shape: VerifierShape
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    hidden_states: tuple[str, ...]
    graphs: Mapping[str, GraphRecord]
    weights: tuple[WeightRef, ...] = ()
    drafters: Mapping[str, DrafterRecord] = field(default_factory=dict)
    tensorrt: TensorRtRecord | None = None
    quality: Quality | None = None
    tools: Mapping[str, str] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    build_key: str = ""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def all_graphs(self) -> dict[str, GraphRecord]:
        """Return every graph by name, those of drafters with names of `names.drafter_graph`."""
        own = {
            drafter_graph(drafter, role): graph
            for drafter, record in self.drafters.items()
            for role, graph in record.graphs.items()
        }
        return {**self.graphs, **own}

    @property
    def precisions(self) -> str:
        """Return the precision, with that of keys and values if the user chose it: `int8, KV in fp16`."""
        return f"{self.precision}, KV in fp16" if self.shape.kv else self.precision

    @property
    def rounding(self) -> Precision:
        """Return the precision between products: fp16 if a bundle in fp32 holds keys and values in it."""
        return "fp16" if self.shape.kv and self.precision == "fp32" else self.precision

    @property
    def largest_call(self) -> tuple[int, int] | None:
        """The most sequences, and nodes of a tree with its root, that the engines take. None without a limit."""
        if self.tensorrt is None:
            return None
        profiles = self.tensorrt.engines[VERIFIER].profiles
        batch, tree = next(profile.inputs[TOKEN_IDS].max for profile in profiles if profile.name == TREE)
        return batch, tree


def verifier_digest(weights: Mapping[str, str]) -> str:
    """Return the digest of a verifier's weights from the SHA-256 of its files by name."""
    return text_digest(*(weights[name] for name in sorted(weights)))


def rebuild_command(out: Path, source: str = "MODEL", options: Sequence[str] = ()) -> str:
    """Return the command that replaces an unusable bundle."""
    return f"run `{shlex.join(['redraft', 'build', source, '-o', str(out), *options, '--force'])}`"


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest as indented JSON, with keys in the order of the fields and its own digest last."""
    return json.dumps(signed(to_plain(manifest)), indent=1, ensure_ascii=False) + "\n"


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's JSON values with the digest of all of them. Files' digests do not cover the manifest."""
    body = {key: value for key, value in values.items() if key != _DIGEST}
    return {**body, _DIGEST: text_digest(json.dumps(body, sort_keys=True))}


def bundle_name(bundle: Path) -> str:
    """Return the name of a bundle, also of an older schema. Raises BundleError like `load_manifest`."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        values = json.loads((bundle / MANIFEST).read_bytes())
        version, name = values.get("schema_version"), values.get("name")
        if type(version) is int and version < SCHEMA_VERSION and isinstance(name, str):
            return name
    return load_manifest(bundle).name


def has_random_weights(bundle: Path) -> bool:
    """Return True if a bundle has random weights. Bundles of an older schema count as not random."""
    with contextlib.suppress(BundleError):
        return load_manifest(bundle).model.random_weights
    return False


def load_manifest(bundle: Path) -> Manifest:
    """Read `bundle`/manifest.json.

    Raises BundleError if it is missing, is not JSON, has another schema version or form, or was changed after it was
    written.
    """
    path = bundle / MANIFEST
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        problem = f"{bundle} is not an engine bundle: expected {MANIFEST} in it, found none"
        raise BundleError(problem, f"run `redraft build MODEL -o {bundle}`") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: expected JSON, found {error}", rebuild_command(bundle)) from None
    if not isinstance(values, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(values).__name__}", rebuild_command(bundle))
    found = values.get("schema_version")
    if found != SCHEMA_VERSION:
        raise BundleError(f"{path}: expected schema version {SCHEMA_VERSION}, found {found}", _rebuild(bundle, values))
    try:
        manifest = from_plain(Manifest, {key: value for key, value in values.items() if key != _DIGEST}, "manifest")
    except UsageError as error:
        raise BundleError(f"{path}: {error.message}", _rebuild(bundle, values)) from None
    if values.get(_DIGEST) != signed(values)[_DIGEST]:
        raise BundleError(f"{path}: its digest does not hold: it was changed", rebuild_command(bundle))
    _check_paths(manifest, bundle)
    return manifest


def _rebuild(out: Path, values: dict[str, Any]) -> str:
    """Return the same command from the readable parts of an invalid manifest."""
    model, options = values.get("model"), values.get("options")
    source = model.get("source") if isinstance(model, dict) else None
    if not (isinstance(source, str) and source):
        return rebuild_command(out)
    return rebuild_command(out, source, [str(option) for option in options] if isinstance(options, list) else ())


def _check_paths(manifest: Manifest, bundle: Path) -> None:
    """Refuse names that would reach outside the bundle, and graphs or weights that no digest covers."""
    hint = rebuild_command(bundle, manifest.model.source, manifest.options)
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if PurePosixPath(name).is_absolute() or ".." in parts or not parts:
            raise BundleError(f"{bundle}: file name {name!r} leaves the bundle", hint)
    used = {record.file for record in manifest.all_graphs.values()} | {ref.file for ref in manifest.weights}
    for drafter in manifest.drafters.values():
        used |= {ref.file for ref in (*drafter.weights, *drafter.tables)}
    if built := manifest.tensorrt:
        used |= {file for engine in built.engines.values() for file in (engine.file, engine.graph)}
        used |= {built.plugin_file} - {""}
    if missing := sorted(used - set(manifest.files)):
        raise BundleError(f"{bundle}: manifest has no digest of {', '.join(missing)}", hint)
