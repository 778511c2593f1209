"""The published checkpoint, loaded by transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.tiny.evaluate import evaluate, mtp_matches
from experiments.tiny.publish import load_run, publish
from experiments.tiny.python_text import has_no_error, syntax_checks
from experiments.tiny.tokenizer import BOS_ID, EOS_ID
from redraft.errors import CheckpointError
from redraft.train.data import is_held_out, load_corpora
from redraft.train.mtp import load_mtp


@pytest.fixture(scope="module")
def corpora(sources, recipe):
    return load_corpora(sources, recipe)


@pytest.fixture(scope="module")
def folder(run, corpora, tmp_path_factory):
    out = tmp_path_factory.mktemp("published")
    publish(run, out, corpora)
    return out


def test_auto_classes_load_the_trained_model(folder, run):
    """The logits equal those of the trained module with weights rounded to bf16."""
    objective, recipe, step = load_run(run)
    assert step == recipe.steps
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for parameter in objective.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.randint(0, 400, (2, 20))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, objective.model(ids).logits, atol=1e-5)
        hidden, following = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
        assert torch.allclose(load_mtp(folder)(hidden, following), objective.mtp(hidden, following), atol=1e-5)


def test_auto_tokenizer_adds_bos_and_gives_text_back(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return 123 + x  # ünïcode\n\n\tdone"
    ids = tokenizer(text).input_ids
    assert ids[0] == BOS_ID
    assert BOS_ID not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == EOS_ID
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x 12\n    y")
    assert [piece for piece, _ in pieces] == ["x", "Ġ1", "2", "ĊĠĠĠ", "Ġy"]


def test_chat_template_makes_the_prompt_of_a_word_problem(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>Question: How many?\nAnswer:"
    answered = [*messages, {"role": "assistant", "content": "Two."}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == "<s>Question: How many?\nAnswer: Two.</s>"


def test_prompts_come_from_held_out_documents(folder, corpora, recipe):
    """A prompt from a training file would improve all figures wrongly."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for kind, corpus in corpora.items():
        lines = (folder / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        items = [json.loads(line) for line in lines]
        assert len(items) >= 40
        assert len({item["id"] for item in items}) == len({item["turns"][0] for item in items}) == len(items)
        texts = {d.name: d.text for d in corpus.held_out}
        for item in items:
            assert item["category"] == kind
            assert is_held_out(kind, item["source"], recipe.held_out_every)
            assert item["turns"][0] + item["reference"] in texts[item["source"]]
            assert not any(item["turns"][0] in d.text for d in corpus.train)
            if kind == "word_problems":
                assert item["turns"][0].endswith("\nAnswer:")
            else:
                assert 40 <= len(tokenizer(item["turns"][0]).input_ids) <= 200


def test_held_out_text_is_of_held_out_documents(folder, corpora):
    for kind, corpus in corpora.items():
        pieces = (folder / "heldout" / f"{kind}.txt").read_text(encoding="utf-8").split("\n<|endoftext|>\n")
        for piece in pieces:
            assert any(piece.strip() in d.text for d in corpus.held_out)
            assert not any(piece.strip() in d.text for d in corpus.train)


def test_evaluation_reads_nothing_but_the_folder(folder):
    figures = evaluate(folder, new_tokens=8)
    assert set(figures.kinds) == {"code", "word_problems", "prose"}
    for kind in figures.kinds.values():
        assert 0 < kind.bits_per_byte < 10
        assert 0 <= kind.mtp_acceptance <= 1
    assert figures.parameters == 400 * 32 + 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32


def test_evaluation_of_a_folder_without_text_gives_a_hint(tmp_path):
    with pytest.raises(CheckpointError, match="heldout"):
        evaluate(tmp_path)


def test_mtp_matches_compares_row_t_with_token_t_plus_two():
    """The first prediction starts at the last prompt token. With a wrong row, acceptance is another token's."""
    prompt, new = [5, 6, 7], [8, 9, 10, 11]
    ids = torch.tensor(prompt + new)
    one_hot = torch.nn.functional.one_hot
    inner = SimpleNamespace(embed_tokens=lambda x: one_hot(x, 12).float())
    model = SimpleNamespace(model=_Callable(inner), lm_head=lambda states: states)
    assert mtp_matches(model, lambda h, e: one_hot(ids[None, 2:], 12).float(), prompt, new) == (3, 3)
    assert mtp_matches(model, lambda h, e: e, prompt, new) == (0, 3)  # x[t + 1], not x[t + 2]


class _Callable:
    """Replaces a model's body: its hidden states are its embeddings."""

    def __init__(self, inner):
        self.embed_tokens = inner.embed_tokens

    def __call__(self, ids):
        return SimpleNamespace(last_hidden_state=self.embed_tokens(ids))


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("    return 1\n", (True, True)),
        ("    x = 1\n    y = 2\n    z = (2,\n", (True, True)),
        ("    x = 1\n    if x:\n        for y in z:\n            w = [\n", (True, False)),
        ("    if x:\n        for y in z:\n            w = [\n", (True, False)),
        ('    """never ends\n    a\n    b\n    c\n', (True, False)),
        ("    x = = 1\n    y\n", (False, False)),
        ("    x = 1\n  y = 2\n", (False, False)),
        ("    return 1\n    cut of", (True, True)),
    ],
)
def test_check_of_python_text(completion, expected):
    assert syntax_checks("def f(x, z):\n", completion) == expected


def test_null_bytes_are_an_error_not_a_crash():
    assert not has_no_error("x = 1\0\n")
