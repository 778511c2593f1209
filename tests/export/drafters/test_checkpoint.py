"""A drafter's folder: its content, and errors that name the fault."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from redraft.errors import CheckpointError
from redraft.export.checkpoint.safetensors import Checkpoint
from redraft.export.drafters.checkpoint import TOKEN_COUNTS, DrafterCheckpoint, Identity, save_drafter
from redraft.export.drafters.lyanna import LyannaConfig, LyannaDrafter
from redraft.export.gguf.checkpoint import GgufCheckpoint
from tests.export.models import write_checkpoint

CONFIG = LyannaConfig(
    hidden_size=48, vocab_size=97, intermediate_size=16, heads=2, kv_heads=1, head_dim=8, rank=3, steps=2
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier") / "model"
    write_checkpoint(folder, "llama")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return Checkpoint.open(folder)


@pytest.fixture
def folder(verifier, tmp_path):
    torch.manual_seed(0)
    counts = torch.arange(97)
    save_drafter(tmp_path, "lyanna", CONFIG, Identity.of(verifier), LyannaDrafter(CONFIG), counts, {"steps": 3})
    return tmp_path


def change(folder, edit):
    """Rewrite the folder's tensors."""
    tensors = load_file(str(folder / "model.safetensors"))
    edit(tensors)
    save_file(tensors, str(folder / "model.safetensors"))


def load(folder):
    checkpoint = DrafterCheckpoint.open(folder)
    module = LyannaDrafter(checkpoint.configure(LyannaConfig))
    return module, checkpoint.load(module)


def test_round_trip_equals_the_saved_values_in_bf16(folder, verifier):
    checkpoint = DrafterCheckpoint.open(folder)
    assert checkpoint.method == "lyanna"
    assert checkpoint.configure(LyannaConfig) == CONFIG
    assert checkpoint.verifier == Identity.of(verifier)
    module, data = load(folder)
    assert torch.equal(data.counts, torch.arange(97))
    assert data.draft_vocabulary is None
    torch.manual_seed(0)
    for name, tensor in LyannaDrafter(CONFIG).state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor.bfloat16().float())
    checkpoint.check_verifier(CONFIG, 48, 97, Identity.of(verifier))


def test_missing_and_surplus_tensors_are_listed(folder):
    def edit(tensors):
        del tensors["projection.weight"], tensors["layer.q_proj.weight"]
        tensors["extra.weight"] = torch.zeros(1)

    change(folder, edit)
    message = r"missing layer\.q_proj\.weight, projection\.weight; surplus extra\.weight"
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("norm.weight", torch.zeros(47), r"norm\.weight is \[47\], expected \[48\]"),
        (TOKEN_COUNTS, torch.zeros(96, dtype=torch.int64), r"token_counts is \[96\], expected \[97\]"),
        (TOKEN_COUNTS, torch.zeros(97, dtype=torch.bfloat16), "token_counts is BF16, expected I32 or I64"),
        ("norm.weight", torch.full((48,), float("nan")), r"norm\.weight holds a number that is not finite"),
    ],
)
def test_shapes_and_numbers_that_do_not_fit_are_named(folder, name, tensor, message):
    change(folder, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


DRAFTED = replace(CONFIG, draft_vocab_size=4)
TOKENS = torch.tensor([0, 3, 7, 96])


def test_a_draft_vocabulary_is_kept_with_the_weights(verifier, tmp_path):
    module = LyannaDrafter(DRAFTED)
    save_drafter(tmp_path, "lyanna", DRAFTED, Identity.of(verifier), module, torch.arange(97), {}, TOKENS)
    found, data = load(tmp_path)
    assert torch.equal(data.draft_vocabulary, TOKENS)
    assert found.config.draft_size == found.token_info.up.out_features == 4
    change(tmp_path, lambda tensors: tensors.pop("draft_vocabulary"))
    with pytest.raises(CheckpointError, match="missing draft_vocabulary"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([0, 3, 7]), r"draft_vocabulary is .*\[3\], expected .*\[4\]"),
        (TOKENS.int(), r"draft_vocabulary is int32\[4\], expected int64\[4\]"),
        (torch.tensor([0, 7, 3, 96]), "distinct tokens from 0 to 96 in ascending order"),
        (torch.tensor([0, 3, 3, 96]), "distinct tokens from 0 to 96 in ascending order"),
        (torch.tensor([0, 3, 7, 97]), "distinct tokens from 0 to 96 in ascending order"),
        (torch.tensor([-1, 3, 7, 96]), "distinct tokens from 0 to 96 in ascending order"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(verifier, tmp_path, tokens, message):
    """It is neither saved nor read."""
    module, identity = LyannaDrafter(DRAFTED), Identity.of(verifier)
    with pytest.raises(CheckpointError, match=message):
        save_drafter(tmp_path, "lyanna", DRAFTED, identity, module, torch.arange(97), {}, tokens)
    assert not (tmp_path / "config.json").exists()
    save_drafter(tmp_path, "lyanna", DRAFTED, identity, module, torch.arange(97), {}, TOKENS)
    change(tmp_path, lambda tensors: tensors.update(draft_vocabulary=tokens))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_drafter_of_the_whole_vocabulary_has_no_draft_vocabulary(verifier, folder):
    with pytest.raises(CheckpointError, match="draft_vocabulary has 4 tokens, expected none"):
        save_drafter(
            folder, "lyanna", CONFIG, Identity.of(verifier), LyannaDrafter(CONFIG), torch.arange(97), {}, TOKENS
        )
    change(folder, lambda tensors: tensors.update(draft_vocabulary=TOKENS))
    with pytest.raises(CheckpointError, match="surplus draft_vocabulary"):
        load(folder)


def test_another_tokenizer_or_other_weights_are_refused(folder, verifier, tmp_path_factory):
    checkpoint = DrafterCheckpoint.open(folder)
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(verifier.path, other)
    (other / "tokenizer.json").write_text("{ }", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"another tokenizer\.json"):
        checkpoint.check_verifier(CONFIG, 48, 97, Identity.of(Checkpoint.open(other)))
    shutil.copy(verifier.path / "tokenizer.json", other)
    change(other, lambda tensors: tensors["model.norm.weight"].add_(1))
    with pytest.raises(CheckpointError, match="another verifier: expected weights"):
        checkpoint.check_verifier(CONFIG, 48, 97, Identity.of(Checkpoint.open(other)))
    identity = Identity.of(verifier)
    with pytest.raises(CheckpointError, match="another verifier"):
        checkpoint.check_verifier(CONFIG, 48, 97, replace(identity, weights=(*identity.weights, "more")))


def test_weights_of_another_drafter_of_the_same_form_are_refused(verifier, folder, tmp_path):
    """A folder that does not name its weights is read as before."""
    module = LyannaDrafter(CONFIG)
    torch.nn.init.ones_(module.layer.q_proj.weight)
    save_drafter(tmp_path / "other", "lyanna", CONFIG, Identity.of(verifier), module, torch.arange(97), {})
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"these are another drafter's weights: expected \w{12}, found \w{12}"):
        load(folder)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del values["weights"]
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert load(folder)[0].layer.q_proj.weight.min() == 1


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_folder_that_is_no_drafter_is_refused(folder, content):
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="redraft train publish"):
        DrafterCheckpoint.open(folder)


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), (b"damaged", "is truncated")])
def test_missing_or_damaged_weights_are_refused(folder, content, problem):
    (folder / "model.safetensors").unlink()
    if content:
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors {problem}"):
        load(folder)


def test_a_gguf_files_identity_is_its_own_digest(tmp_path):
    """It holds its tokenizer, so one in the same folder does not count."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert Identity.of(GgufCheckpoint.open(file)) == Identity((hashlib.sha256(b"weights").hexdigest(),), "")
