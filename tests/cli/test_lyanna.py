"""A bundle with a Lyanna drafter on the command line: its description, and every refusal of a damaged one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Refused, Run, edit_manifest
from tests.little import WORDS, Redraft, write_checkpoint

from redraft.assembly.drafters import drafter_digests, settings_of
from redraft.config import BuildConfig, DrafterBuild
from redraft.engines import open_bundle
from redraft.errors import BundleError
from redraft.export.checkpoint.safetensors import Checkpoint

STEPS = 3
OPTIONS = "token_info=int8,nodes=31"


@pytest.fixture(scope="module")
def drafter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for `checkpoint`; not to be written to."""
    from tests.export.drafters.tiny import CONFIG, write_drafter

    config = replace(CONFIG, vocab_size=len(WORDS), steps=STEPS)
    return write_drafter(tmp_path_factory.mktemp("drafter"), Checkpoint.open(checkpoint), config)


@pytest.fixture(scope="module")
def drafted(run: Run, checkpoint: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with that drafter, its token information in int8; not to be written to."""
    out = tmp_path_factory.mktemp("engines") / "drafted"
    summary = run("build", checkpoint, "-o", out, "--drafter", f"{drafter},{OPTIONS}", "--eval-text", "none")
    (found,) = summary["drafters"].values()
    assert (found["method"], found["table_bytes"]) == ("lyanna", 32 * 32 + 4 * 32)
    assert (found["shape"]["token_info"], found["shape"]["draft_vocabulary"]) == ("int8", 32)
    return out


@pytest.fixture
def copy(drafted: Path, tmp_path: Path) -> Path:
    """The bundle, to be damaged."""
    return Path(shutil.copytree(drafted, tmp_path / "drafted"))


def test_default_method_is_the_bundles_own_and_writes_the_plain_text(run: Run, drafted: Path, tmp_path: Path) -> None:
    """All methods write one text, and the trace of a drafted one replays."""
    trace, budget = tmp_path / "trace", ("--budget", "nodes=12,depth=3,width=4")
    command = ("generate", "--engines", drafted, "--prompt", "the cat", "--max-new-tokens", "40", "--ignore-eos")
    default = run(*command, *budget, "--trace", trace)
    assert default["method"] == "ngram+lyanna"
    for method, options in (("none", ()), ("ngram", budget), ("lyanna", ()), ("ngram+lyanna", ())):
        assert run(*command, "--method", method, *options)["token_ids"] == default["token_ids"]
    played = run("replay", trace)
    assert set(played["sources"]) <= {"fresh", "resample", "none"}
    assert played["sources"]["fresh"]["nodes"] > 0
    accepted = sum(source["accepted"] for source in played["sources"].values())
    assert accepted >= default["metrics"]["num_accepted_draft_tokens"]
    assert played["requests"]["0"] >= 7 + 40


def test_inspect_tells_of_the_drafter(redraft: Redraft, drafted: Path) -> None:
    shown = redraft("inspect", drafted).stdout
    assert "drafter    lyanna: lyanna, 3 steps, 4 wide, 31 nodes, 16 resampled, token information in int8" in shown
    assert "drafters   lyanna" in shown
    assert "graph      lyanna.draft.single" in shown


def test_the_same_drafter_again_is_no_build(run: Run, checkpoint: Path, drafter: Path, drafted: Path) -> None:
    again = run("build", checkpoint, "-o", drafted, "--drafter", f"{drafter},{OPTIONS}", "--eval-text", "none")
    assert again["cached"] is True


def test_files_of_a_drafter_are_part_of_the_build_key(
    checkpoint: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    settings = [settings_of(DrafterBuild("lyanna", str(folder), "lyanna"), BuildConfig())]
    verifier = Checkpoint.open(checkpoint)
    before = drafter_digests(settings, verifier)
    assert set(before) == {"drafter lyanna config.json", "drafter lyanna model.safetensors"}
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert drafter_digests(settings, verifier) != before
    assert drafter_digests([], verifier) == {}


# --- damaged bundles -------------------------------------------------------------------------------------------------


def ref(values: dict[str, Any], name: str = "token_info.table") -> dict[str, Any]:
    return next(ref for ref in own(values)["tables"] if ref["initializer"] == name)


def own(values: dict[str, Any]) -> dict[str, Any]:
    """Return the drafter's record."""
    return values["drafters"]["lyanna"]  # type: ignore[no-any-return]


def test_a_flipped_byte_of_the_table(refused: Refused, checkpoint: Path, drafter: Path, copy: Path) -> None:
    """The whole file is the table: only the digest detects damage. The hint's command builds the same file again."""
    file = copy / "weights" / "lyanna.tables.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    line = refused("generate", "--engines", copy, "--prompt", "a", status=1)
    assert "lyanna.tables.safetensors: expected SHA-256" in line
    options = f"--drafter {drafter},{OPTIONS} --force`"
    assert line.endswith(f"run `redraft build {checkpoint} -o {copy} {options}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: ref(m).update(shape=[32, 31]), "table token_info.table: expected 1024 bytes of int8[32, 32]"),
        (lambda m: ref(m).update(offset=ref(m)["offset"] + 10**6), "table token_info.table: expected 1024 bytes"),
        (lambda m: own(m)["tables"].remove(ref(m)), "expected a table token_info.table, found none"),
        (
            lambda m: own(m)["shape"].update(draft_vocabulary=31),
            "table token_info.table: expected 992 bytes of int8[32, 31]",
        ),
        (lambda m: own(m)["shape"].update(steps=4), "drafter lyanna: expected limits TreeLimits(depth=4"),
        (lambda m: m["files"].pop(ref(m)["file"]), "manifest has no digest of weights/lyanna.tables.safetensors"),
        (lambda m: own(m)["graphs"].pop("draft"), "expected a graph 'lyanna.draft'"),
        (lambda m: own(m)["graphs"].pop("resample"), "expected a graph 'lyanna.resample'"),
        (
            lambda m: own(m)["graphs"]["draft.single"]["outputs"].pop(),
            "graph lyanna.draft.single: expected tensor kv.0.value.present.1, found none",
        ),
        (
            lambda m: own(m)["graphs"]["draft"]["inputs"].pop(),
            "graph lyanna.draft: expected tensor token_info.scales, found none",
        ),
        (lambda m: own(m)["graphs"].update(redraw=own(m)["graphs"]["draft"]), "unexpected graph 'lyanna.redraw'"),
        (lambda m: own(m)["graphs"].pop("copy_slot"), "expected a graph 'lyanna.copy_slot'"),
        (lambda m: own(m)["state"].pop(), "drafter lyanna: expected state"),
        (lambda m: own(m)["shape"].update(rank="8"), "shape of lyanna: rank must be a positive number, not '8'"),
        (lambda m: own(m)["shape"].update(colour=1), "drafter lyanna: shape of lyanna: unknown key colour"),
        (lambda m: own(m).update(method="absent"), "drafter lyanna: unknown drafting method 'absent'"),
        (lambda m: own(m).update(verifier_digest="0" * 64), "drafter lyanna belongs to another verifier: expected"),
        (lambda m: own(m).update(hidden_states=["last", "3"]), "drafter lyanna: expected hidden states ('last',)"),
        (lambda m: m["drafters"].update({"a.b": own(m)}), "expected ids of drafters, found lyanna, a.b"),
        (lambda m: m["drafters"].update(ngram=own(m)), "expected ids of drafters, found lyanna, ngram"),
    ],
)
def test_a_manifest_that_does_not_fit_its_drafter(
    copy: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_manifest(copy, change)
    with pytest.raises(BundleError) as error:
        open_bundle(copy, verify=False)
    assert message in str(error.value)
    assert "run `redraft build" in str(error.value)


def test_a_bundle_without_a_drafter(refused: Refused, bundle: Path) -> None:
    for method in ("lyanna", "ngram+lyanna"):
        line = refused("generate", "--engines", bundle, "--prompt", "a", "--method", method, status=2)
        assert (
            "no drafter 'lyanna'; choose one of none, ngram, suffix, lookahead, or build it with `redraft build" in line
        )


def test_a_method_that_is_no_drafter_of_the_bundle(refused: Refused, drafted: Path) -> None:
    for method in ("absent", "ngram+absent", "lyanna+ngram", "ngram+", "ngram+none", "ngram+ngram"):
        line = refused("generate", "--engines", drafted, "--prompt", "a", "--method", method, status=2)
        assert "choose one of none, ngram, suffix, lookahead, lyanna, ngram+lyanna, suffix+lyanna" in line


@pytest.mark.parametrize("place", ["", "no/such/folder/trace"])
def test_a_trace_that_cannot_be_written(refused: Refused, bundle: Path, tmp_path: Path, place: str) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "a", "--trace", tmp_path / place, status=2)
    assert f"--trace {tmp_path / place} cannot be written" in line


# --- drafters that do not belong -------------------------------------------------------------------------------------


@pytest.fixture
def other(drafter: Path, tmp_path: Path) -> Path:
    """A copy of the drafter, to be changed."""
    return Path(shutil.copytree(drafter, tmp_path / "other"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def test_a_folder_that_is_no_drafter(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    line = refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", empty, "--eval-text", "none", status=1)
    assert f"{empty} is not a drafter: config.json cannot be read" in line
    assert not (tmp_path / "out").exists()


def test_another_model_of_the_same_shape(refused: Refused, drafter: Path, tmp_path: Path) -> None:
    """Its weights differ from those that the drafter was trained for."""
    model = write_checkpoint(tmp_path / "model", shards="1MB")
    line = refused("build", model, "-o", tmp_path / "out", "--drafter", drafter, "--eval-text", "none", status=1)
    assert "was trained for another verifier" in line
    assert not (tmp_path / "out").exists()


def test_a_drafter_that_was_cut_off(refused: Refused, checkpoint: Path, other: Path, tmp_path: Path) -> None:
    os.truncate(other / "model.safetensors", 100)
    line = refused("build", checkpoint, "-o", tmp_path / "out", "--drafter", other, "--eval-text", "none", status=1)
    assert "model.safetensors is truncated" in line


def test_a_drafter_of_a_method_that_nobody_knows(refused: Refused, checkpoint: Path, other: Path) -> None:
    change_config(other, lambda values: values.update(method="absent"))
    line = refused("build", checkpoint, "--drafter", other, "--eval-text", "none", status=2)
    assert "unknown drafting method 'absent'; the methods are none, ngram, suffix, lookahead, lyanna" in line


def test_a_recipes_drafter_with_a_wrong_key(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'source = "{checkpoint}"\n[build.drafters.a]\nsource = "x"\nmethod = "lyanna"\ndepth = 3\n')
    line = refused("build", recipe, "-o", tmp_path / "out", status=2)
    assert "build.drafters.a: unknown key depth; known keys are draft_vocabulary" in line
