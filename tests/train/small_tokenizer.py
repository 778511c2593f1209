"""The tokenizer of small verifiers: byte-level BPE with one token a digit and one token for an indentation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from redraft.train.data import Document

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
# GPT-2's pattern with separate digits. A line break and the indentation after it are one piece, so Python's
# indentation costs one token a line. The last space belongs to the word.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CHARS_A_KIND = 3_000_000
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Answer: {{ message['content'] }}{{ eos_token }}"
    "{% elif message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


def train_tokenizer(kinds: Sequence[Sequence[Document]], vocab_size: int, seed: int) -> Tokenizer:
    """Train on equal numbers of characters of every kind, in random documents by `seed`, without repetition."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(kinds, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def _sample(kinds: Sequence[Sequence[Document]], seed: int) -> Iterator[str]:
    budget = min(_CHARS_A_KIND, *(sum(len(d.text) for d in documents) for documents in kinds))
    for documents in kinds:
        order = list(documents)
        random.Random(seed).shuffle(order)
        left = budget
        for document in order:
            if left > 0:
                yield document.text[:left]
                left -= len(document.text)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write the files that `AutoTokenizer` reads: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    build: Any = PreTrainedTokenizerFast
    fast = build(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=max_positions,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(str(folder))
    # both transformers 4 and 5 know this class; transformers 5 would write one that 4 does not know
    change_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, without="backend")


def change_json(path: Path, values: Mapping[str, Any], without: str) -> None:
    """Replace values of a JSON file, and remove one."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found.pop(without, None)
    path.write_text(json.dumps({**found, **values}, indent=2) + "\n", encoding="utf-8")
