"""A bundle with a Lyanna drafter on the command line: what it says of it, and everything about one that is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft.cli.assembly import _drafter_digests
from redraft.cli.build_options import Precision, TokenInfo, Weights, choose, choose_lyanna, options_of
from redraft.config import BuildConfig, LyannaBuild
from redraft.engines import open_bundle
from redraft.engines.manifest import signed
from redraft.errors import BundleError, UsageError

from .conftest import WORDS, write_checkpoint

Refused = Callable[..., str]
Redraft = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 3
NODES = ("--drafter-option", "nodes=31")


@pytest.fixture(scope="session")
def drafter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for `checkpoint`; not to be written to."""
    from tests.export.drafters.tiny import CONFIG, write_drafter

    from redraft.export.checkpoint import Checkpoint

    config = replace(CONFIG, vocab_size=len(WORDS), steps=STEPS)
    return write_drafter(tmp_path_factory.mktemp("drafter"), Checkpoint.open(checkpoint), config)


@pytest.fixture(scope="session")
def drafted(redraft: Redraft, checkpoint: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with that drafter, its token information in int8; not to be written to."""
    out = tmp_path_factory.mktemp("engines") / "drafted"
    result = redraft("build", checkpoint, "-o", out, "--lyanna", drafter, "--token-info", "int8", "--eval-text", "none",
                     "--json", *NODES)  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["token_info"] == {"form": "int8", "hot_tokens": 32, "bytes": 32 * 32 + 4 * 32}
    assert summary["drafters"] == ["ngram", "lyanna"]
    return out


@pytest.fixture
def copy(drafted: Path, tmp_path: Path) -> Path:
    """The bundle, to be damaged."""
    return Path(shutil.copytree(drafted, tmp_path / "drafted"))


def test_default_method_is_the_bundles_own_and_writes_the_plain_text(
    redraft: Redraft, drafted: Path, tmp_path: Path
) -> None:
    """By itself, beside n-grams and plainly: one text; the trace of a drafted one plays again."""
    trace, figures = tmp_path / "trace", {}
    arguments = ("generate", "--engines", drafted, "--prompt", "the cat", "--max-new-tokens", "40", "--ignore-eos",
                 "--json")  # fmt: skip
    budget = ("--budget", "nodes=12,depth=3,width=4")
    for method, more in ((None, (*budget, "--trace", trace)), ("none", ()), ("ngram", budget), ("lyanna", ())):
        result = redraft(*arguments, *(("--method", method) if method else ()), *more)
        assert result.returncode == 0, result.stderr
        figures[method] = json.loads(result.stdout)
    assert figures[None]["method"] == "lyanna"
    assert len({tuple(found["token_ids"]) for found in figures.values()}) == 1
    played = json.loads(redraft("replay", trace, "--json").stdout)
    assert set(played["sources"]) <= {"fresh", "resample", "none"}
    assert played["sources"]["fresh"]["nodes"] > 0
    accepted = sum(source["accepted"] for source in played["sources"].values())
    assert accepted >= figures[None]["metrics"]["num_accepted_draft_tokens"]
    assert played["requests"]["0"] >= 7 + 40


def test_inspect_tells_of_the_drafter(redraft: Redraft, drafted: Path) -> None:
    shown = redraft("inspect", drafted).stdout
    assert "lyanna     3 steps, 4 wide, 31 nodes; token information of 32 tokens in int8" in shown
    assert "drafters   ngram, lyanna" in shown
    assert "graph      lyanna.draft.single" in shown


def test_the_same_drafter_again_is_no_build(redraft: Redraft, checkpoint: Path, drafter: Path, drafted: Path) -> None:
    again = redraft("build", checkpoint, "-o", drafted, "--lyanna", drafter, "--token-info", "int8", "--eval-text",
                    "none", "--json", *NODES)  # fmt: skip
    assert json.loads(again.stdout)["cached"] is True


def test_what_a_drafters_folder_holds_is_part_of_the_build_key(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(drafter, tmp_path / "drafter"))
    config = BuildConfig(lyanna=LyannaBuild(str(folder)))
    before = _drafter_digests(config)
    assert set(before) == {"lyanna config.json", "lyanna model.safetensors"}
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert _drafter_digests(config) != before
    assert _drafter_digests(BuildConfig()) == {}


# --- damaged bundles -------------------------------------------------------------------------------------------------


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as one who knows how it is signed."""
    values = json.loads((bundle / "manifest.json").read_text())
    change(values)
    (bundle / "manifest.json").write_text(json.dumps(signed(values)))


def ref(values: dict[str, Any], name: str = "token_info.table") -> dict[str, Any]:
    return next(ref for ref in values["weights"] if ref["initializer"] == name)


def test_a_flipped_byte_of_the_table(refused: Refused, checkpoint: Path, drafter: Path, copy: Path) -> None:
    """The whole file is table: no check but the digest can see it. The command that mends it builds the same again."""
    file = copy / "weights" / "lyanna.token_info.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    line = refused("generate", "--engines", copy, "--prompt", "a", status=1)
    assert "lyanna.token_info.safetensors: expected SHA-256" in line
    told = f"--lyanna {drafter} --token-info int8 --drafter-option nodes=31 --force`"
    assert line.endswith(f"run `redraft build {checkpoint} -o {copy} {told}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: ref(m).update(shape=[32, 31]), "table token_info.table: expected 1024 bytes of int8[32, 32]"),
        (lambda m: ref(m).update(length=1000), "table token_info.table: expected 1024 bytes"),
        (lambda m: ref(m).update(offset=ref(m)["offset"] + 10**6), "table token_info.table: expected 1024 bytes"),
        (lambda m: ref(m).update(offset=-1), "table token_info.table: expected 1024 bytes"),
        (lambda m: ref(m, "token_info.scales").update(shape=[32]), "table token_info.scales: expected 128 bytes"),
        (lambda m: m["weights"].remove(ref(m)), "expected a table token_info.table, found none"),
        (lambda m: ref(m).update(dtype="F16"), "token_info.table"),
        (lambda m: m["lyanna"].update(hot=31), "expected a table token_info.index, found none"),
        (lambda m: m["lyanna"].update(token_info="fp16"), "token_info.table"),
        (lambda m: m["lyanna"].update(token_info="fp3"), "manifest.lyanna.token_info: expected one of"),
        (lambda m: m["lyanna"].update(steps=4), "graph lyanna.draft: expected chain_logits float32[B,4,32]"),
        (lambda m: m["lyanna"].update(nodes=20), "graph lyanna.draft: expected tree.tokens int64[B,20]"),
        (lambda m: m["files"].pop(ref(m)["file"]), "manifest has no digest of weights/lyanna.token_info.safetensors"),
        (lambda m: m["graphs"].pop("lyanna.draft"), "expected a graph 'lyanna.draft'"),
        (lambda m: m["graphs"].pop("lyanna.resample"), "expected a graph 'lyanna.resample'"),
        (
            lambda m: m["graphs"]["lyanna.draft.single"]["outputs"].pop(),
            "graph lyanna.draft.single: expected tensor kv.0.value.present.1, found none",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_its_drafter(
    copy: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(copy, change)
    with pytest.raises(BundleError) as error:
        open_bundle(copy, verify=False)
    assert message in str(error.value)
    assert "run `redraft build" in str(error.value)


def test_a_bundle_without_a_drafter(refused: Refused, bundle: Path) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "a", "--method", "lyanna", status=2)
    assert "this bundle has no Lyanna drafter; build it with `redraft build MODEL --lyanna DIR`" in line


@pytest.mark.parametrize("place", ["", "no/such/folder/trace"])
def test_a_trace_that_cannot_be_written(refused: Refused, bundle: Path, tmp_path: Path, place: str) -> None:
    line = refused("generate", "--engines", bundle, "--prompt", "a", "--trace", tmp_path / place, status=2)
    assert f"--trace {tmp_path / place} cannot be written" in line


# --- drafters that do not belong -------------------------------------------------------------------------------------


@pytest.fixture
def other(drafter: Path, tmp_path: Path) -> Path:
    """The drafter, to be changed."""
    return Path(shutil.copytree(drafter, tmp_path / "other"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(redraft_drafter="eagle"), "is a drafter of method 'eagle', expected 'lyanna'"),
        (lambda v: v["config"].update(hidden_size=48), "trained for hidden states of width 48, the verifier has 32"),
        (lambda v: v["config"].update(vocab_size=33), "trained for a vocabulary of 33, the verifier has 32"),
        (lambda v: v["config"].update(heads=3), "3 heads of 16"),
        (lambda v: v["config"].update(depth=2), "unknown key depth"),
        (lambda v: v["verifier"].update(weights=["0" * 64]), "trained for another verifier: expected weights 00000000"),
        (lambda v: v["verifier"].update(tokenizer="0" * 64), "trained with another tokenizer.json"),
    ],
)
def test_a_drafter_that_does_not_belong(
    refused: Refused, checkpoint: Path, other: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object],
    message: str,
) -> None:  # fmt: skip
    change_config(other, change)
    out = tmp_path / "engines"
    line = refused("build", checkpoint, "-o", out, "--lyanna", other, "--eval-text", "none", status=1)
    assert message in line
    assert not out.exists()


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_folder_that_is_no_drafter(refused: Refused, checkpoint: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    line = refused("build", checkpoint, "-o", tmp_path / "out", "--lyanna", tmp_path / folder, "--eval-text", "none",
                   status=1)  # fmt: skip
    assert f"{tmp_path / folder} is no drafter: config.json cannot be read" in line
    assert not (tmp_path / "out").exists()


def test_another_model_of_the_same_shape(refused: Refused, drafter: Path, tmp_path: Path) -> None:
    """Its weights differ from those that the drafter was trained for."""
    model = write_checkpoint(tmp_path / "model", shards="1MB")
    line = refused("build", model, "-o", tmp_path / "out", "--lyanna", drafter, "--eval-text", "none", status=1)
    assert "was trained for another verifier" in line


def test_token_info_without_a_drafter(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    for more in ((), ("--lyanna", "none")):
        line = refused("build", checkpoint, "-o", tmp_path / "out", "--token-info", "fp8", *more, status=2)
        assert "--token-info is for a Lyanna drafter" in line
        assert "give --lyanna DIR" in line
    assert "--token-info" in refused("build", checkpoint, "--token-info", "fp3", status=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "depth=3",
            "--drafter-option 'depth=3': expected KEY=VALUE; keys are steps, width, nodes, precision, hot_tokens",
        ),
        ("source=x", "expected KEY=VALUE"),
        ("token_info=fp8", "expected KEY=VALUE"),
        ("nodes", "--drafter-option 'nodes': expected KEY=VALUE"),
        ("nodes=", "--drafter-option 'nodes=': expected KEY=VALUE"),
        ("nodes=0", "lyanna.nodes must be a positive number, not 0"),
        ("nodes=many", "lyanna.nodes must be a positive number, not 'many'"),
        ("precision=fp8", "unknown lyanna.precision 'fp8'"),
    ],
)
def test_an_option_of_the_drafter_that_does_not_fit(option: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_lyanna(BuildConfig(), "mine", None, [option])
    assert message in str(error.value)


def test_an_option_without_a_drafter(refused: Refused, checkpoint: Path) -> None:
    line = refused("build", checkpoint, "--drafter-option", "nodes=3", status=2)
    assert "--drafter-option is for a Lyanna drafter, and none is built; give --lyanna DIR" in line


OWN = LyannaBuild("recipes", steps=3, nodes=12)


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        (BuildConfig(), BuildConfig()),
        (BuildConfig(), BuildConfig(precision="int4", max_model_len=64, random_weights=True)),
        (BuildConfig(lyanna=OWN), BuildConfig(lyanna=OWN)),
        (BuildConfig(lyanna=OWN), BuildConfig()),
        (BuildConfig(lyanna=OWN), BuildConfig(random_weights=True)),
        (BuildConfig(lyanna=OWN), BuildConfig(random_weights=True, lyanna=OWN)),
        (BuildConfig(lyanna=OWN), BuildConfig(lyanna=replace(OWN, source="mine", token_info="int8"))),
        (BuildConfig(lyanna=OWN), BuildConfig(lyanna=LyannaBuild("recipes", steps=2, nodes=32, precision="fp32"))),
        (BuildConfig(), BuildConfig(lyanna=LyannaBuild("mine", 2, 3, 5, "lowrank", "fp32", 7, 9))),
    ],
)
def test_the_options_told_make_the_same_configuration_again(recipe: BuildConfig, config: BuildConfig) -> None:
    told = options_of(recipe, config)
    values = dict(zip(told[::2], told[1::2], strict=True))
    some = [value for flag, value in zip(told[::2], told[1::2], strict=True) if flag == "--drafter-option"]
    precision, form, max_model_len = (values.get(flag) for flag in ("--precision", "--token-info", "--max-model-len"))
    weights = Weights(values.get("--weights", "checkpoint"))
    found = choose(
        recipe,
        Precision(precision) if precision else None,
        None,
        weights,
        int(max_model_len) if max_model_len else None,
    )
    lyanna = choose_lyanna(found, values.get("--lyanna"), TokenInfo(form) if form else None, some)
    assert replace(found, lyanna=lyanna) == config


def test_the_command_line_overrides_the_recipes_drafter() -> None:
    recipe = BuildConfig(lyanna=LyannaBuild("recipes", steps=3, nodes=12))
    assert choose_lyanna(recipe, None, None) == recipe.lyanna
    assert choose_lyanna(recipe, "none", None) is None
    assert choose_lyanna(recipe, "mine", None) == LyannaBuild("mine", steps=3, nodes=12)
    assert choose_lyanna(recipe, None, TokenInfo.fp8) == LyannaBuild("recipes", steps=3, nodes=12, token_info="fp8")
    assert choose_lyanna(BuildConfig(), "mine", None) == LyannaBuild("mine")
    settings = BuildConfig(lyanna=LyannaBuild(steps=3))
    assert choose_lyanna(settings, None, None) is None
    assert choose_lyanna(settings, "mine", None) == LyannaBuild("mine", steps=3)


def test_a_recipes_drafter_is_random_beside_random_weights() -> None:
    recipe = BuildConfig(lyanna=LyannaBuild("recipes", steps=3), random_weights=True)
    assert choose_lyanna(recipe, None, None) == LyannaBuild("random", steps=3)
    assert choose_lyanna(recipe, "none", None) is None
    assert choose_lyanna(BuildConfig(random_weights=True), None, None) is None


def test_token_info_needs_a_drafter() -> None:
    recipe = BuildConfig(lyanna=LyannaBuild("recipes", steps=3))
    with pytest.raises(UsageError, match="none is built"):
        choose_lyanna(recipe, "none", TokenInfo.fp8)


def test_a_recipes_drafter_with_a_wrong_key(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'source = "{checkpoint}"\n[build.lyanna]\nsource = "x"\ndepth = 3\n')
    line = refused("build", recipe, "-o", tmp_path / "out", status=2)
    assert "build.lyanna: unknown key depth; known keys are hot_tokens" in line
