"""`redraft generate`: text, figures, grammars, and prompts and options that it refuses in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Refused, Run, edit_manifest, replace_file
from tests.little import WORDS, Redraft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redraft import names

METRICS = {
    "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length",
    "draft_acceptance_rate", "acceptance_histogram", "decode_tokens_per_second", "time_to_first_token_ms", "stage_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(run: Run, bundle: Path) -> dict[str, Any]:
    """Return the plain continuation of a prompt."""
    return run("generate", "--engines", bundle, "--prompt", "abc abc", "--method", "none")


def test_json_has_text_usage_and_metrics(plain: dict[str, Any]) -> None:
    usage, metrics = plain["usage"], plain["metrics"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, len(plain["token_ids"]))
    assert set(metrics) >= METRICS
    assert set(metrics["stage_ms"]) == {"draft", "verify", "resample", "host"}
    assert plain["finish_reason"] in {"length", "stop"}


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("abc abc", ("--budget", "nodes=4,depth=3,width=2")),
        ("abc abc", ("--device", "cpu")),
        ("-", ()),
        (None, ("--prompt-file", "prompt")),
    ],
)
def test_streamed_text_equals_plain(
    redraft: Redraft, bundle: Path, plain: dict[str, Any], tmp_path: Path, prompt: str | None,
    options: tuple[str, ...],
) -> None:  # fmt: skip
    """By n-grams, over step graphs, and with the prompt from the standard input or a file."""
    (tmp_path / "prompt").write_text("abc abc")
    given = () if prompt is None else ("--prompt", prompt)
    result = redraft("generate", "--engines", bundle, *given, *options, input="abc abc", cwd=tmp_path)
    assert result.stdout == f"{plain['text']}\n"


def test_a_seed_gives_a_text_with_any_method(run: Run, bundle: Path) -> None:
    options = ("--temperature", "0.7", "--top-p", "0.95", "--min-new-tokens", "9", "--repetition-penalty", "1.2",
               "--logit-bias", "5=1.5", "--ban", "7", "--logprobs", "1", "--sampling", "model")  # fmt: skip

    def tokens(method: str, seed: int) -> list[dict[str, Any]]:
        arguments = ("--prompt", "abc abc", "--method", method, "--max-new-tokens", "20", "--seed", seed, *options)
        return list(run("generate", "--engines", bundle, *arguments)["logprobs"])

    first = tokens("none", 3)
    assert first == tokens("ngram", 3) != tokens("none", 4)
    assert len(first) >= 9
    assert 7 not in {token["token_id"] for token in first}


@pytest.mark.parametrize(("system", "text", "tokens"), [((), "abc.", 4), (("--system", "the cat"), "the catabc.", 11)])
def test_chat_wraps_the_prompt_in_the_template(
    run: Run, bundle: Path, system: tuple[str, ...], text: str, tokens: int
) -> None:
    command = ("generate", "--engines", bundle, "--max-new-tokens", "4", "--prompt")
    chat = run(*command, "abc", "--chat", *system)
    assert chat["usage"]["prompt_tokens"] == tokens
    assert chat["token_ids"] == run(*command, text)["token_ids"]


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (None, "this model has no chat template; give a plain prompt, without --chat"),
        ("{{ raise_exception('users only') }}", "the chat template refuses these messages: users only"),
        ("{{ messages[0].content.nothing() }}", "the chat template refuses these messages: UndefinedError"),
        ("{% if %}", "does not compile"),
    ],
)
def test_chats_that_the_template_refuses(
    refused: Refused, with_template: Callable[[str | None], Path], template: str | None, word: str
) -> None:
    engines = with_template(template)
    assert word in refused("generate", "--engines", engines, "--prompt", "a", "--chat", status=2)


def test_a_chat_past_the_context(refused: Refused, bundle: Path) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "a" * 40, "--chat", "--system", "b" * 23, status=2)
    assert "the conversation has 64 tokens and the context holds 64" in line


def test_empty_prompt_is_the_bare_bos_token(run: Run, bundle: Path) -> None:
    assert run("generate", "--engines", bundle, "--prompt", "")["usage"]["prompt_tokens"] == 1


def test_empty_prompt_without_bos_token(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "little"))
    edit_manifest(copy, lambda manifest: manifest.update(bos_token_id=None))
    assert "no beginning-of-sequence token" in refused("generate", "--engines", copy, "--prompt", "", status=2)


def test_prompt_past_the_context(refused: Refused, bundle: Path) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "a" * 64, status=2)
    assert "64 tokens" in line
    assert "shorten the prompt" in line


@pytest.mark.parametrize("version", [1, 99])
def test_every_command_refuses_another_schema_with_the_command_that_rebuilds(
    tmp_path: Path, version: int, refused: Refused
) -> None:
    """Of the manifest, only the model's source and the options are read then."""
    (tmp_path / "prompts.jsonl").write_text('{"id": "p", "category": "code", "turns": ["a"]}\n')
    model = {"source": "my model", "colour": "red"}
    manifest = {"schema_version": version, "model": model, "options": ["--precision", "int8"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    engines, prompt, prompts = ("--engines", tmp_path), ("--prompt", "a"), ("--prompts", tmp_path / "prompts.jsonl")
    commands: list[tuple[object, ...]] = [
        ("inspect", tmp_path), ("generate", *engines, *prompt), ("bench", *engines, *prompts),
        ("profile", *engines, *prompt), ("doctor", *engines), ("check", "lossless", *engines, *prompts),
    ]  # fmt: skip
    rebuild = f"run `redraft build 'my model' -o {tmp_path} --precision int8 --force`"
    for command in commands:
        assert refused(*command, status=1).endswith(f"found {version}; {rebuild}"), command


def test_no_bundle(refused: Refused, tmp_path: Path) -> None:
    assert "run `redraft build" in refused("generate", "--engines", tmp_path, "--prompt", "a", status=1)
    assert "run `redraft build" in refused("inspect", tmp_path / "absent", status=1)


def test_a_refusal_leaves_the_trace_that_was_there(refused: Refused, bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("kept\n")
    for options in (["--method", "magic"], ["--logit-bias", "99=1"]):
        refused("generate", "--engines", bundle, "--prompt", "a", "--trace", trace, *options, status=2)
        assert trace.read_text() == "kept\n"


def test_prompt_files_that_cannot_be_read(refused: Refused, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    assert "not UTF-8" in refused("generate", "--engines", "x", "--prompt-file", latin, status=1)
    absent = tmp_path / "absent"
    assert f"cannot read {absent}" in refused("generate", "--engines", "x", "--prompt-file", absent, status=2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "one of --prompt and --prompt-file"),
        (["--prompt", "a", "--method", "magic"], "this bundle has no drafter 'magic'"),
        (["--prompt", "a\udcff"], "the prompt is not UTF-8 (character 1)"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be 0 (greedy) or above, at most 1e30, not -1.0"),
        (["--prompt", "a", "--min-new-tokens", "200"], "min_tokens is 200 and max_tokens 128"),
        (["--prompt", "a", "--logit-bias", "5"], "--logit-bias '5': expected ID=BIAS"),
        (["--prompt", "a", "--logit-bias", "99=1"], "logit_bias has the token id 99, the model knows 0 to"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["--prompt", "a", "--sampling", "yours"], "--sampling 'yours' is unknown; the only choice is model"),
        (["--prompt", "a", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--budget", "nodes=4"], "--budget"),
        (["--prompt", "a", "--method", "none", "--budget", "nodes=4,depth=2,width=2"], "--budget would do nothing"),
        (["--prompt", "a", "--stop", ""], "stop string"),
        (["--prompt", "a", "--threads", "0"], "--threads"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--prompt", "a", "--seed", "x"], "--seed"),
        (["--prompt", "a", "--device", "tpu"], "unknown device 'tpu'; choose one of cpu, cuda"),
        (["--prompt", "a", "--controller", "bold"], "unknown controller 'bold'; choose one of adaptive, fixed"),
        (["--prompt", "a", "--controller", "fixed"], "the controller fixed needs a budget"),
        (["--prompt", "a", "--prediction", "absent.txt"], "cannot read absent.txt"),
        (["--prompt", "a", "--drafter-option", "ngram"], "expected ID.KEY=VALUE"),
        (["--prompt", "a", "--drafter-option", "magic.x=1"], "no drafter 'magic' to give options; choose one of none"),
        (["--prompt", "a", "--drafter-option", "ngram.x=1"], "ngram: unknown key x"),
        (["--prompt", "a", "--drafter-option", "ngram.prompt_lookup_max=many"], "must be a whole number, not 'many'"),
        (["--prompt", "a", "--drafter-option", "ngram.prompt_lookup_max=true"], "must be a whole number, not True"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, arguments: list[str], word: str) -> None:
    assert word in refused("generate", "--engines", bundle, *arguments, status=2)


def test_a_prediction_does_not_change_the_text(
    run: Run, refused: Refused, bundle: Path, plain: dict[str, Any], tmp_path: Path
) -> None:
    """An empty one changes nothing; one past the context, or for plain decoding, is refused."""
    command = ("generate", "--engines", bundle, "--prompt", "abc abc", "--budget", "nodes=8,depth=8,width=1")
    predicted = tmp_path / "predicted.txt"
    for text in (str(plain["text"]), ""):
        predicted.write_text(text, encoding="utf-8")
        found = run(*command, "--prediction", predicted)
        assert found["token_ids"] == plain["token_ids"]
        assert found["metrics"]["num_draft_tokens"] > 0
    predicted.write_text("abc " * 3000, encoding="utf-8")
    assert "shorten the prediction" in refused(*command, "--prediction", predicted, status=2)
    refusal = refused(*command[:5], "--method", "none", "--prediction", predicted, status=2)
    assert "plain decoding takes no prediction" in refusal
    predicted.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(*command, "--prediction", predicted, status=1)


def test_a_drafters_options_reach_it(run: Run, bundle: Path, plain: dict[str, Any]) -> None:
    """With a context of one token suffix decoding drafts one token a step; the text stays."""
    command = ("generate", "--engines", bundle, "--prompt", "abc abc", "--method", "suffix")
    options = ("--budget", "nodes=8,depth=8,width=1", "--drafter-option", "suffix.suffix_decoding_max_tree_depth=2")
    found = run(*command, *options)
    assert found["token_ids"] == plain["token_ids"]
    assert found["metrics"]["num_draft_tokens"] == found["metrics"]["num_spec_steps"] > 0


@pytest.fixture(scope="module")
def spelling(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle whose tokenizer has the same ids, and bytes that llguidance can read."""
    tokenizer = Tokenizer(models.BPE({word.replace(" ", "\u0120"): i for i, word in enumerate(WORDS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:3])
    folder = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("spelling") / "engines"))
    return replace_file(folder, names.TOKENIZER_FILE, tokenizer.to_str())


def test_texts_match_their_grammar(redraft: Redraft, spelling: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "rules.lark"
    grammar.write_text('start: "a" "b"~3', encoding="utf-8")
    for option, value, expected in (("--regex", "(ab){2}c?", "(ab){2}c?"), ("--grammar", grammar, "abbb")):
        result = redraft("generate", "--engines", spelling, "--prompt", "abc abc", option, value)
        assert re.fullmatch(expected, result.stdout.strip()), result.stderr


def test_a_schema_that_the_vocabulary_cannot_spell(refused: Refused, spelling: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}', encoding="utf-8")
    asked = ("generate", "--engines", spelling, "--prompt", "abc")
    for option in (("--json-schema", schema), ("--json-object",)):
        assert "no text matches the JSON schema" in refused(*asked, *option, status=2)


def test_wrong_constraints(refused: Refused, spelling: Path, tmp_path: Path) -> None:
    asked = ("generate", "--engines", spelling, "--prompt", "abc")
    assert "the regular expression does not compile" in refused(*asked, "--regex", "(", status=2)
    assert "one of regex and json_object" in refused(*asked, "--regex", "a", "--json-object", status=2)
    schema = tmp_path / "schema.json"
    schema.write_text("{", encoding="utf-8")
    assert "the JSON schema is not JSON" in refused(*asked, "--json-schema", schema, status=2)
    assert "unknown acceptance" in refused(*asked, "--acceptance", "lucky", status=2)


def test_a_tokenizer_that_cannot_be_read(refused: Refused, bundle: Path) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "abc", "--regex", "a", status=2)
    assert "llguidance cannot read this model's tokenizer" in line
