"""A real pretrained checkpoint writes the same text as its authors' own program, from the bare BOS token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Run

from redraft.train.config import RECIPES


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    """The checkpoint's folder; skips if it is absent."""
    folder = shared / "data" / "checkpoints" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"no stories260k checkpoint at {folder}")
    return folder


@pytest.fixture(scope="module")
def engines(stories: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "stories260k"
    run("build", stories, "-o", out, "--eval-text", "none")
    return out


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_golden_text(run: Run, stories: Path, engines: Path, method: str) -> None:
    written = run("generate", "--engines", engines, "--prompt", "", "--max-new-tokens", "200", "--method", method)
    assert written["usage"]["completion_tokens"] == 200
    assert written["text"].strip() == (stories / "golden_greedy.txt").read_text(encoding="utf-8").strip()


@pytest.fixture(scope="module")
def drafted(stories: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines with a drafter that was trained briefly on the model's own stories."""
    folder = tmp_path_factory.mktemp("drafter")
    recipe = (RECIPES / "lyanna-stories260k.toml").read_text(encoding="utf-8")
    smaller = {"steps = 600": "steps = 30", "batch_tokens = 4096": "batch_tokens = 1024", "rows = 512": "rows = 8",
               "new_tokens = 240": "new_tokens = 112", "seq_len = 256": "seq_len = 128"}  # fmt: skip
    for old, new in smaller.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "brief.toml").write_text(recipe, encoding="utf-8")
    run("train", "lyanna", "--verifier", stories, "--config", folder / "brief.toml", "--out", folder / "run")
    run("train", "publish", folder / "run", "--out", folder / "drafter")
    built = ("build", stories, "-o", folder / "engines", "--drafter", folder / "drafter", "--eval-text", "none")
    run(*built, "--skip-check")
    return folder / "engines"


@pytest.mark.slow
def test_a_drafter_of_its_own_stories_writes_the_golden_text(run: Run, stories: Path, drafted: Path) -> None:
    """Even a drafter of thirty steps is sometimes right, and never changes the text."""
    budget = ("--budget", "nodes=6,depth=3,width=4")
    written = run("generate", "--engines", drafted, "--prompt", "", "--max-new-tokens", "200", *budget)
    assert written["method"] == "ngram+lyanna"
    assert written["metrics"]["num_accepted_draft_tokens"] > 10
    assert written["text"].strip() == (stories / "golden_greedy.txt").read_text(encoding="utf-8").strip()
