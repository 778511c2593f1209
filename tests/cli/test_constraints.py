"""`redraft generate` with constraints: options, files, and errors in one line."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Refused
from tests.little import WORDS, Redraft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from redraft import names
from redraft.engines.manifest import signed


@pytest.fixture(scope="module")
def spelling(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle whose tokenizer has the same ids, and bytes that llguidance can read."""
    tokenizer = Tokenizer(models.BPE({word.replace(" ", "\u0120"): i for i, word in enumerate(WORDS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(WORDS[:3])
    folder = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("spelling") / "engines"))
    manifest = json.loads((folder / "manifest.json").read_text())
    data = tokenizer.to_str().encode()
    (folder / names.TOKENIZER_FILE).write_bytes(data)
    manifest["files"][names.TOKENIZER_FILE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(signed(manifest)))
    return folder


def test_texts_match(redraft: Redraft, spelling: Path, tmp_path: Path) -> None:
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
