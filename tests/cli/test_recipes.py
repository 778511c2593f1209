"""`redraft build` of a recipe: its shape alone with random weights, labelled everywhere, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, Run
from tests.little import Redraft

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def write_recipe(folder: Path, backend: str = "onnxruntime", **shape: object) -> Path:
    """A recipe of a small shape with a missing checkpoint, with a budget but no drafter."""
    values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**SHAPE, **shape}.items())
    build = (
        f'backend = "{backend}"\nprecision = "fp16"\n[build.drafters.lyanna]\nmethod = "lyanna"\nsteps = 3\nnodes = 12'
    )
    path = folder / "small.toml"
    path.write_text(f'source = "nobody/nothing"\n[shape]\n{values}\n[build]\n{build}\n')
    return path


@pytest.fixture(scope="module")
def random_bundle(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a shape alone; not to be written to."""
    folder = tmp_path_factory.mktemp("recipe")
    summary = run("build", write_recipe(folder), "-o", folder / "engines", "--weights", "random")
    assert (summary["precision"], list(summary["drafters"])) == ("fp16", ["lyanna"])
    assert summary["caveats"][0].startswith("random weights (the verifier, lyanna): ")
    return folder / "engines"


def test_random_engines_are_labelled_everywhere(
    run: Run, redraft: Redraft, random_bundle: Path, tmp_path: Path
) -> None:
    """A token for each byte: every text can be a prompt, and no end of text stops it."""
    label = "random weights (the verifier, lyanna)"
    shown = redraft("inspect", random_bundle).stdout
    assert f"beware     {label}" in shown
    assert "beware     stand-in tokenizer" in shown
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["abc"]}) + "\n")
    engines = ("--engines", random_bundle, "--max-new-tokens", 6)
    asked = ("generate", *engines, "--prompt", "é!")
    assert f"beware: {label}" in redraft(*asked).stderr
    assert f"beware: {label}" in redraft("profile", *engines, "--prompt", "abc").stderr
    assert label in redraft("bench", *engines, "--prompts", tmp_path / "prompts.jsonl", "--methods", "ngram").stdout
    for method in ("ngram+lyanna", "none"):
        found = run(*asked, "--method", method)
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 6}
        assert [caveat.partition(" ")[0] for caveat in found["caveats"]] == ["random", "stand-in"]


def test_a_recipe_without_a_drafter_builds_without_one(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Its checkpoint is at --model-path; the command that rebuilds the bundle names it too."""
    recipe = write_recipe(tmp_path, vocab_size=32)
    out = tmp_path / "engines"
    assert run("build", recipe, "--model-path", checkpoint, "-o", out)["drafters"] == {}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["options"] == ["--model-path", str(checkpoint)]
    assert manifest["model"]["stand_in_tokenizer"] is False


def test_a_checkpoint_of_another_shape(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    recipe = write_recipe(tmp_path, vocab_size=32, intermediate_size=96)
    line = refused("build", recipe, "--model-path", checkpoint, "-o", out, status=1)
    assert "intermediate_size is 64, expected 96" in line
    assert not out.exists()


def test_without_tensorrt(refused: Refused, tmp_path: Path) -> None:
    """The refusal comes before anything is downloaded or read."""
    for model in (write_recipe(tmp_path, backend="tensorrt"), "vicuna-7b"):
        line = refused("build", model, "-o", tmp_path / "out", status=1)
        assert "TensorRT" in line
        assert "BACKEND=onnxruntime" in line


def test_a_recipe_without_an_available_checkpoint_is_refused(refused: Refused, tmp_path: Path) -> None:
    line = refused("build", write_recipe(tmp_path), "-o", tmp_path / "out", status=1)
    assert "--model-path" in line
    assert "--weights random" in line


def test_a_model_path_without_a_recipe(refused: Refused, checkpoint: Path) -> None:
    assert "--model-path needs a recipe" in refused("build", checkpoint, "--model-path", checkpoint, status=2)


def test_bf16_engines_do_not_open_on_onnx_runtime(redraft: Redraft, refused: Refused, tmp_path: Path) -> None:
    options = ("--weights", "random", "--precision", "bf16", "--drafter", "none")
    redraft("build", write_recipe(tmp_path), "-o", tmp_path / "out", *options)
    line = refused("generate", "--engines", tmp_path / "out", "--prompt", "a", status=1)
    assert "no CPU kernels for bf16; build it with --precision fp16 or fp32" in line
