"""Writes a checkpoint's text files into a bundle: tokenizer, chat templates, special token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft import names
from redraft.assembly.tokenizer_conversion import VOCABULARIES, load_tokenizer, vocabulary_file, write_tokenizer
from redraft.errors import CheckpointError, UnsupportedModelError
from redraft.export.checkpoint.base import DOWNLOAD_AGAIN, AnyCheckpoint, read_json_object
from redraft.export.gguf.checkpoint import GgufCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SETTINGS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", names.GENERATION_CONFIG_FILE,
    "chat_template.json",
)  # fmt: skip
OTHERS = ("tokenizer.*.json", "merges.txt", names.CHAT_TEMPLATE_FILE, f"{names.CHAT_TEMPLATES_FOLDER}/*.jinja")

_TEMPLATE_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin and end a text; None and empty if the checkpoint has none."""

    bos: int | None
    eos: tuple[int, ...]


def text_files(checkpoint: Path) -> tuple[str, ...]:
    """Return paths, relative to the checkpoint, of all files of tokenizer, chat templates and special ids."""
    patterns = (*VOCABULARIES, *SETTINGS, *OTHERS)
    found = {path for pattern in patterns for path in checkpoint.glob(pattern) if path.is_file()}
    return tuple(sorted(path.relative_to(checkpoint).as_posix() for path in found))


def write_stand_in(bundle: Path, vocabulary: int) -> SpecialTokens:
    """Put a tokenizer of `vocabulary` ids into `bundle`, with one token for each byte. Other ids read `<|id|>`.

    It has no end-of-text token, since a model with random weights never finds one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<|{token}|>" for token in range(len(alphabet), vocabulary))][:vocabulary]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(bundle / names.TOKENIZER_FILE))
    return SpecialTokens(None, ())


def write_text_files(checkpoint: Path, bundle: Path) -> SpecialTokens:
    """Put tokenizer, special tokens, chat templates and sampling defaults of `checkpoint` into `bundle`.

    transformers loads them.

    Raises CheckpointError for a missing or damaged file, UnsupportedModelError for a format that cannot be converted.
    """
    settings = {name: _read(checkpoint / name) for name in SETTINGS}
    tokenizer = load_tokenizer(checkpoint, settings["tokenizer_config.json"])
    write_tokenizer(tokenizer, bundle / names.TOKENIZER_FILE, vocabulary_file(checkpoint))
    _write_sampling_defaults(checkpoint, settings[names.GENERATION_CONFIG_FILE], bundle)
    tokens = dict(tokenizer.special_tokens_map)
    (bundle / names.SPECIAL_TOKENS_FILE).write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")
    templates = _chat_templates(tokenizer.chat_template or settings["chat_template.json"].get("chat_template"))
    for name, template in templates.items():
        default = name == names.DEFAULT_CHAT_TEMPLATE
        path = bundle / (names.CHAT_TEMPLATE_FILE if default else f"{names.CHAT_TEMPLATES_FOLDER}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")
    return _special_tokens(tokenizer, settings, _read(checkpoint / "config.json"))


@dataclass(frozen=True)
class Tokens:
    """The tokens of a checkpoint: words by id, without those that only fill the vocabulary up, and ids of added ones.

    Added tokens are not words of text: marks of turns, ends of texts.
    """

    words: Mapping[int, str]
    added: frozenset[int]

    @classmethod
    def of(cls, checkpoint: AnyCheckpoint) -> Tokens:
        """Read a checkpoint's tokens. Raises CheckpointError if it has no tokenizer, or like `load_tokenizer`."""
        if isinstance(checkpoint, GgufCheckpoint):
            from redraft.export.gguf.tokenizer import read_tokens

            return cls(*read_tokens(checkpoint.header))
        tokenizer = load_tokenizer(checkpoint.path, _read(checkpoint.path / "tokenizer_config.json"))
        words = {token: word for word, token in tokenizer.get_vocab().items()}
        return cls(words, frozenset(tokenizer.added_tokens_decoder))


def check_same_tokens(what: str, source: Path, own: Tokens, verifier: Tokens) -> None:
    """Raise CheckpointError if the ordinary tokens of a draft model are not those of the verifier.

    Text is the verifier's in any case, so only speed depends on this. A token that one of the two lacks, or an added
    token that is another word in one of the two, is never accepted. Different ordinary tokens would be most of a draft.
    """
    added = own.added | verifier.added
    common = [token for token in own.words if token in verifier.words and token not in added]
    different = sorted(token for token in common if own.words[token] != verifier.words[token])
    if different or not common:
        found = "no word is in both"
        if different:
            first = different[0]
            words = f"{own.words[first]!r} instead of {verifier.words[first]!r}"
            found = f"{len(different)} of {len(common)} tokens differ, first token {first}, {words}"
        raise CheckpointError(
            f"{what}: {source} has another tokenizer than the verifier: {found}",
            "give a draft model with the verifier's tokenizer",
        )


def _write_sampling_defaults(checkpoint: Path, generation: Mapping[str, Any], bundle: Path) -> None:
    """Keep the sampling parameters of generation_config.json, if the checkpoint has such a file."""
    if (checkpoint / names.GENERATION_CONFIG_FILE).exists():
        kept = {name: generation[name] for name in names.SAMPLING_DEFAULTS if generation.get(name) is not None}
        text = json.dumps(kept, indent=2) + "\n"
        (bundle / names.GENERATION_CONFIG_FILE).write_text(text, encoding="utf-8")


def _chat_templates(found: Any) -> dict[str, str]:
    """Return templates by name, from one template, a list of named ones or a dictionary."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry}
    named = found if isinstance(found, dict) else {names.DEFAULT_CHAT_TEMPLATE: found} if found else {}
    for name, template in named.items():
        if not isinstance(template, str) or not _TEMPLATE_NAME.fullmatch(str(name)):
            raise CheckpointError(f"expected chat templates by name, found {name!r}: {template!r:.60}", DOWNLOAD_AGAIN)
    return named


def _special_tokens(
    tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, dict[str, Any]], config: dict[str, Any]
) -> SpecialTokens:
    """Return the tokenizer's token that begins a text, and the ids at which `generate` of transformers stops.

    Ids come from generation_config.json, then config.json, then its `text_config`. EOS falls back to the tokenizer's
    token. BOS falls back to these files if the tokenizer has no settings.
    """
    nested = config.get("text_config")
    sources = (settings[names.GENERATION_CONFIG_FILE], config, nested if isinstance(nested, dict) else {})

    def listed(name: str) -> tuple[int, ...]:
        return _ids(name, next((source[name] for source in sources if source.get(name) is not None), None))

    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is None and not settings["tokenizer_config.json"] and not settings["special_tokens_map.json"]:
        bos = next(iter(listed("bos_token_id")), None)
    return SpecialTokens(bos, listed("eos_token_id") or (() if eos is None else (eos,)))


def _ids(name: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in values):
        raise UnsupportedModelError(
            f"{name} is {value!r}, expected a number or a list of numbers", "fix generation_config.json or config.json"
        )
    return tuple(values)


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if the file is missing. Raises CheckpointError if it is damaged."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
