"""Draft models by the command line: checkpoints, students and random ones; and checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.little import Redraft, write_checkpoint

from redraft.runtime import Budget, Runtime, SamplingParams, SpeculationParams

PROMPTS = ["def add(a, b):\n    return", "Tom has 3 apples. He buys"]


@pytest.fixture(scope="module")
def layers(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its first and its last layer, as a plain checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    tiny, out = root / "assets" / "tiny", tmp_path_factory.mktemp("layers")
    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    kept = torch.nn.ModuleList([whole.model.layers[0], whole.model.layers[-1]])
    whole.model.layers, whole.config.num_hidden_layers = kept, len(kept)
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = whole.config.layer_types[:2]
    whole.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, out)
    return out


@pytest.mark.slow
def test_the_embedded_model_with_draft_models(redraft: Redraft, root: Path, layers: Path, tmp_path: Path) -> None:
    out, drafts = (
        tmp_path / "tiny",
        ("--drafter", f"small={layers},steps=12", "--drafter", "dm=random,method=draft_model"),
    )
    built = redraft(
        "build", root / "assets" / "tiny", "-o", out, *drafts, "--skip-check", "--eval-text", "none", "--json"
    )
    assert built.returncode == 0, built.stderr
    made = json.loads(built.stdout)["drafters"]
    assert made["small"]["summary"] == "2 layers, 12 steps"
    assert (made["small"]["method"], made["small"]["precision"]) == ("draft_model", "int8")
    found = redraft("generate", "--engines", out, "--prompt", PROMPTS[0], "--method", "small", "--max-new-tokens", "24",
                    "--ignore-eos", "--budget", "nodes=6,depth=6,width=1", "--json")  # fmt: skip
    assert found.returncode == 0, found.stderr
    metrics = json.loads(found.stdout)["metrics"]
    assert metrics["num_draft_tokens"] > 0
    inspected = redraft("inspect", out)
    assert "2 layers, 12 steps" in inspected.stdout
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for slots, device in ((1, None), (2, "cpu")):
        with Runtime.open(out, threads=1, max_num_seqs=slots, device=device, verify=False) as runtime:
            plain = [text.token_ids for text in runtime.generate(PROMPTS, params, "none")]
            for way in ("ngram+small", SpeculationParams("small", budget=Budget(8, 8, 1)), "dm"):
                texts = runtime.generate(PROMPTS, params, way)
                assert [text.token_ids for text in texts] == plain


def test_checkpoints_that_do_not_fit_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    verifier = write_checkpoint(tmp_path / "verifier")

    def line(change: Callable[[Path], None], options: str = "") -> str:
        folder = Path(shutil.copytree(verifier, tmp_path / "draft", dirs_exist_ok=True))
        change(folder)
        drafter = f"d={folder}{options}"
        return refused("build", verifier, "-o", tmp_path / "out", "--drafter", drafter, "--skip-check", status=1)

    def other_token(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        words = values["model"]["vocab"]
        words["ä"] = words.pop("a")
        path.write_text(json.dumps(values), encoding="utf-8")

    def no_tokenizer(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()

    assert "1 of 29 tokens differ, first token 3, 'ä' instead of 'a'" in line(other_token)
    assert "draft has no tokenizer.json and no other file with a vocabulary" in line(no_tokenizer)
