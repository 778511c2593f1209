"""The text side of a checkpoint, as a bundle keeps it: tokenizer, chat template, special token ids."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft import names
from redraft.errors import CheckpointError, UnsupportedModelError

FILES = (
    names.TOKENIZER_FILE,
    "tokenizer_config.json",
    "generation_config.json",
    names.CHAT_TEMPLATE_FILE,
    "chat_template.json",
)


OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that begin, end and pad a text; None and empty where the checkpoint names none."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def has_tokenizer(checkpoint: Path) -> bool:
    """Whether a checkpoint's folder has anything that a tokenizer can be made of."""
    return any((checkpoint / name).is_file() for name in (*FILES[:2], *OLDER_FILES))


def write_stand_in(bundle: Path, vocabulary: int) -> SpecialTokens:
    """Put a tokenizer of `vocabulary` ids into `bundle` that makes a token of each byte; other ids read `<|id|>`.

    There is no end of text: a model with random weights has none to find.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<|{token}|>" for token in range(len(alphabet), vocabulary))][:vocabulary]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(bundle / names.TOKENIZER_FILE))
    return SpecialTokens(None, (), None)


def copy_text_files(checkpoint: Path, bundle: Path) -> SpecialTokens:
    """Put tokenizer and chat template into `bundle`. Raises CheckpointError for a missing or damaged file."""
    _copy_tokenizer(checkpoint, bundle)
    settings = _read(checkpoint / "tokenizer_config.json")
    template = _chat_template(checkpoint, settings)
    if template is not None:
        (bundle / names.CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return _special_tokens(checkpoint, settings, bundle / names.TOKENIZER_FILE)


def _copy_tokenizer(checkpoint: Path, bundle: Path) -> None:
    """Copy `tokenizer.json`; a checkpoint that has an older format only is converted by transformers."""
    if (checkpoint / names.TOKENIZER_FILE).is_file():
        shutil.copyfile(checkpoint / names.TOKENIZER_FILE, bundle / names.TOKENIZER_FILE)
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(checkpoint).backend_tokenizer.save(str(bundle / names.TOKENIZER_FILE))
    except Exception as error:  # transformers raises whatever the missing piece raises
        raise CheckpointError(
            f"{checkpoint} has no {names.TOKENIZER_FILE}, and none can be made of what it has ({type(error).__name__})",
            "copy the model's tokenizer.json beside its config.json",
        ) from error


def _chat_template(checkpoint: Path, settings: dict[str, Any]) -> str | None:
    if (checkpoint / names.CHAT_TEMPLATE_FILE).is_file():
        return (checkpoint / names.CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    template = settings.get("chat_template") or _read(checkpoint / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(checkpoint: Path, settings: dict[str, Any], tokenizer: Path) -> SpecialTokens:
    """The tokenizer's own words first, then the ids that the generation and model configurations give."""
    ids = _added_tokens(tokenizer)
    generation, config = _read(checkpoint / "generation_config.json"), _read(checkpoint / "config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        eos = _id_of("eos_token", settings, ids)
    bos = _id_of("bos_token", settings, ids) if settings else config.get("bos_token_id")
    pad = _id_of("pad_token", settings, ids)
    return SpecialTokens(bos, _ids("eos_token_id", eos), pad)


def _id_of(name: str, settings: dict[str, Any], ids: dict[str, int]) -> int | None:
    token = settings.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    return ids.get(content) if isinstance(content, str) else None


def _ids(name: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) for item in values):
        raise UnsupportedModelError(f"{name} is {value!r}, expected a number or a list of numbers", "mend config.json")
    return tuple(values)


def _added_tokens(tokenizer: Path) -> dict[str, int]:
    values = _read(tokenizer)
    added = {entry["content"]: entry["id"] for entry in values.get("added_tokens", ())}
    vocabulary = values.get("model", {}).get("vocab", {})
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else added


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing. Raises CheckpointError where it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error})", "download or copy the checkpoint again") from error
    return value if isinstance(value, dict) else {}
