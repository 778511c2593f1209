"""`redraft train all`: runs share texts and protocol, an interruption costs nothing, and figures are the runs'."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from redraft.cli.train import app
from redraft.errors import TrainingError, UsageError
from redraft.train import compare, drafter_run
from redraft.train.compare import FACTS, RESULTS, CompareRecipe, RunTable, chosen, train_all
from redraft.train.compare_results import Result, results_table
from redraft.train.drafter_run import COUNTS, TEXTS
from redraft.train.objectives.feature_drafter import MEASURED
from redraft.train.progress import PROGRESS, read_progress
from redraft.train.trained_drafter import RunFacts, TrainedDrafter

SCHEDULE = """
steps = 4
batch_tokens = 128
seq_len = 16
decay_seq_len = 16
warmup_steps = 2
optimizer = "adam"
lr = 0.003
held_out_every = 3
evaluate_every = 2

[self_text]
rows = 12
prompt_tokens = 6
new_tokens = 20
held_out_rows = 3
"""
RUNS = """
schedule = "SCHEDULE"
seeds = [0, 1]
drafter = { draft_vocabulary = 300 }

[runs.first]
method = "eagle"

[runs."second, k = 2"]
method = "griffin"
drafter = { aligned = 2, passes = 2 }
"""


NAMES = ["first", "second, k = 2"]


def write_config(folder):
    (folder / "schedule.toml").write_text(SCHEDULE)
    (folder / "runs.toml").write_text(RUNS.replace("SCHEDULE", str(folder / "schedule.toml")))
    return str(folder / "runs.toml")


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


@pytest.fixture(scope="module")
def finished(verifier_folder, prose, tmp_path_factory):
    """A finished comparison: its recipe, its folder, its results, and the folders that states were computed for."""
    folder, computed = tmp_path_factory.mktemp("comparison"), []
    recipe, ask = CompareRecipe.load(write_config(folder)), drafter_run.KeptStates

    def counting(plan, folder, facts, hidden_states, compute):
        return ask(
            plan, folder, facts, hidden_states, lambda batch: computed.append(folder.relative_to(out)) or compute(batch)
        )

    out, begun = folder / "out", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_run, "KeptStates", counting)
        results = train_all(recipe, verifier_folder, prose, out, begun=lambda *run: begun.append(run))
    assert begun == [(one.name, one.seed) for one in results] == [(name, seed) for seed in (0, 1) for name in NAMES]
    return recipe, out, results, computed


def test_runs_share_texts_and_states_and_each_has_its_own_settings(finished):
    _, out, results, computed = finished
    states = [f"{TEXTS}/states.{seed}.{MEASURED}.last" for seed in (0, 1)]
    assert [str(path) for path in computed] == [folder for folder in states for _ in range(4)]
    for one in results:
        folder = out / f"{one.name}.{one.seed}"
        assert not (folder / TEXTS).exists()
        lines = read_progress(folder / PROGRESS)
        assert [line["step"] for line in lines] == [2, 4]
        assert one.tokens == 4 * 8 * (16 + MEASURED)  # steps, rows, and tokens of a row with those to predict
        assert one.seconds == pytest.approx(sum(line["seconds"] for line in lines), abs=2e-3)
        shares = lines[-1]["acceptance"]["prose"]["top"]
        assert one.chain_tokens == {"prose": pytest.approx(1 + sum(np.cumprod(shares)))}
        assert [line["step"] for line in one.progress] == [2, 4]
        assert one.progress[-1]["chain_tokens"] == one.chain_tokens
        assert one.progress[-1]["accuracy"] == {"prose": pytest.approx(sum(shares) / len(shares))}
        assert [line["loss"] for line in one.progress] == [line["losses"]["loss"] for line in lines]
        counts = np.sort(np.load(folder / COUNTS))[::-1]
        assert [(round(part * len(counts)), round(share * counts.sum())) for part, share in one.frequencies] == [
            (size, counts[:size].sum()) for size in (len(counts) // part for part in (64, 32, 16, 8, 4, 2, 1))
        ]
        assert json.loads((folder / "run.json").read_text())["config"]["draft_vocab_size"] == 300
    assert results[0].parameters < results[1].parameters
    one_pass, two_passes = (line["losses"] for line in read_progress(out / "second, k = 2.0" / PROGRESS))
    assert "aligned 2" in two_passes.keys() - one_pass.keys()
    assert json.loads((out / RESULTS).read_text()) == json.loads(json.dumps([one.to_dict() for one in results]))
    table = results_table(results).splitlines()
    assert [line.split("  ")[0] for line in table[1:3]] == NAMES
    assert f"{results[0].parameters:,}" in table[1]


def test_finished_runs_are_not_repeated(finished, verifier_folder, prose):
    recipe, out, results, _ = finished
    files = {path: path.stat().st_mtime_ns for path in (out / TEXTS).rglob("*.npy")}
    again = train_all(recipe, verifier_folder, prose, out, begun=lambda *run: pytest.fail("it was finished"))
    assert again == results
    assert {path: path.stat().st_mtime_ns for path in (out / TEXTS).rglob("*.npy")} == files


def test_runs_that_predict_fewer_tokens_share_the_texts_too(finished, verifier_folder, prose, tmp_path):
    out = shutil.copytree(finished[1], tmp_path / "out")
    recipe = replace(chosen(finished[0], ("first",), (0,)), runs={"heads": RunTable("medusa", {"heads": 2})})
    (found,) = train_all(recipe, verifier_folder, prose, out)
    assert found.tokens == 4 * 8 * (16 + 2)


def test_an_interrupted_comparison_continues(finished, verifier_folder, prose, tmp_path, monkeypatch):
    recipe, out = chosen(finished[0], (), (0,)), shutil.copytree(finished[1], tmp_path / "out")
    shutil.rmtree(out / f"{NAMES[1]}.0")
    train, started = drafter_run.train, []

    def killed(*given, report, **more):
        started.append(more["resume"])

        def until_two(step):
            report(step)
            if len(started) == 1 and step.step == 2:
                raise KeyboardInterrupt

        return train(*given, report=until_two, **more)

    monkeypatch.setattr(drafter_run, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(recipe, verifier_folder, prose, out, checkpoint_every=1)
    results = train_all(recipe, verifier_folder, prose, out, checkpoint_every=1)
    assert started == [False, True]
    expected = [(one.acceptance, one.tokens) for one in finished[2] if one.seed == 0]
    assert [(one.acceptance, one.tokens) for one in results] == expected


def test_another_comparison_in_the_folder_is_refused(config, tmp_path, verifier_folder, prose, monkeypatch):
    """Whatever the names of files: their contents count."""
    recipe, out = CompareRecipe.load(config), tmp_path / "out"
    monkeypatch.setattr(compare, "train_drafter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_all(recipe, verifier_folder, prose, out)
    text = tmp_path / "prose.txt"
    shutil.copy(prose["prose"], text)
    moved = shutil.copytree(verifier_folder, tmp_path / "moved")
    with pytest.raises(KeyboardInterrupt):  # the same under other names
        train_all(recipe, moved, {"prose": str(text)}, out)
    facts = json.loads((out / FACTS).read_text())
    for noted in facts["recipes"].values():
        del noted["decay"]
    (out / FACTS).write_text(json.dumps(facts))
    with pytest.raises(KeyboardInterrupt):  # noted before recipes had this field, whose default is as they were
        train_all(recipe, verifier_folder, prose, out)

    schedule = tmp_path / "schedule.toml"
    schedule.write_text(SCHEDULE.replace("lr = 0.003", "lr = 0.004"))
    with pytest.raises(TrainingError, match="has a comparison that differs in its recipe of first; give another --out"):
        train_all(recipe, verifier_folder, prose, out)
    schedule.write_text(SCHEDULE)
    with pytest.raises(TrainingError, match="has a comparison that differs in its recipe of first"):
        train_all(compare.replace(recipe, steps=3), verifier_folder, prose, out)
    text.write_text(text.read_text() + "One more line.\n")
    with pytest.raises(TrainingError, match="has a comparison that differs in its documents"):
        train_all(recipe, verifier_folder, {"prose": str(text)}, out)
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    with pytest.raises(TrainingError, match="has a comparison that differs in its verifier"):
        train_all(recipe, moved, prose, out)
    (out / FACTS).write_text("{}")
    with pytest.raises(TrainingError, match="damaged or of another version"):
        train_all(recipe, verifier_folder, prose, out)


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = [0, 1]", "seeds = [0, 0]"), "seeds that are all different"),
        (("seeds = [0, 1]", "seeds = []"), "a comparison needs runs, and seeds"),
        (('method = "eagle"', 'method = "absent"'), "unknown drafting method"),
        (("aligned = 2", "aligned = -2"), "aligned"),
        (("aligned = 2", "alined = 2"), "unknown key drafter.alined"),
        (("[runs.first]", '[runs."../first"]'), "cannot be the name of a run's folder"),
        (("seeds = [0, 1]", "steps = -1"), "steps must be 0 or more"),
        (
            ("[runs.first]", '[runs.first]\nstart = "second, k = 2"'),
            "cannot start from .*; name a run that .* before it",
        ),
        (("[runs.first]", '[tables.A]\nruns = ["third"]\n[runs.first]'), "the table 'A' names a run .*: 'third'"),
    ],
)
def test_damaged_comparisons_are_refused(config, tmp_path, change, message):
    path = tmp_path / "runs.toml"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(Exception, match=message) as error:
        CompareRecipe.load(config)
    assert hasattr(error.value, "hint")


def test_some_runs_and_seeds_may_be_chosen(config):
    recipe = CompareRecipe.load(config)
    assert list(chosen(recipe, ("first",), (7,)).runs) == ["first"]
    assert chosen(recipe, (), ()) == recipe
    with pytest.raises(UsageError, match="the comparison has no run 'third'; its runs are first; second"):
        chosen(recipe, ("third",), ())


STUDENTS = """
schedule = "SCHEDULE"

[runs.pretrained]
method = "draft_model"
schedule = "PLAIN"

[runs.steered]
method = "steered"
start = "pretrained"
"""


@pytest.fixture
def students(tmp_path):
    """A comparison whose second run starts from its first, which has a schedule and texts of its own."""
    layers = "\n[drafter]\nlayers = [0]\n"
    (tmp_path / "schedule.toml").write_text(SCHEDULE + layers)
    (tmp_path / "plain.toml").write_text(
        SCHEDULE.replace("rows = 12", "rows = 8").replace("lr = 0.003", "lr = 0.1") + layers
    )
    text = STUDENTS.replace("SCHEDULE", str(tmp_path / "schedule.toml")).replace("PLAIN", str(tmp_path / "plain.toml"))
    (tmp_path / "students.toml").write_text(text)
    return tmp_path / "students.toml"


def test_a_run_starts_from_an_earlier_one_with_its_own_schedule_and_texts(verifier_folder, prose, students, tmp_path):
    recipe, out = CompareRecipe.load(str(students)), tmp_path / "out"
    assert [recipe.recipe_of(name, 0).lr for name in recipe.runs] == [0.1, 0.003]
    train_all(recipe, verifier_folder, prose, out)
    assert (out / TEXTS).is_dir()
    assert (out / f"{TEXTS}.steered").is_dir()
    started = RunFacts.read(out / "steered.0")
    assert started is not None
    assert started.start == TrainedDrafter.open(out / "pretrained.0").digest()


def test_a_chosen_run_brings_the_run_that_it_starts_from(students):
    assert list(chosen(CompareRecipe.load(str(students)), ("steered",), ()).runs) == ["pretrained", "steered"]


@pytest.mark.parametrize(
    "name", ["compare", "compare-tiny", "compare-smollm2", "compare-students-tiny", "compare-lyanna-tiny"]
)
def test_our_comparisons_are_valid(name):
    assert len(CompareRecipe.load(name).runs) >= 5


def test_our_distilled_and_steered_students_share_one_schedule():
    """Their rate is in one file. Each ablation differs from the steered run in one field; k = 8 is the paper's."""
    recipe = CompareRecipe.load("compare-students-tiny")
    found = {name: recipe.recipe_of(name, 0).to_dict() for name, run in recipe.runs.items() if name != "pretrained"}
    assert {recipe.runs[name].schedule for name in found} == {""}
    for rate in ("1e-3", "3e-4"):
        one, other = (found.pop(f"{name} at {rate}") for name in ("distilled", "steered"))
        assert one["lr"] == other["lr"] == float(rate)
        for same in (one, other):
            assert {**same, "lr": 0.003} == found["distilled" if same is one else "steered"]
    tables = {name: values.pop("drafter") for name, values in found.items()}
    assert all(values == {**found["distilled"], "method": values["method"]} for values in found.values())
    steered = tables["steered"]
    assert {name: steered[name] for name in tables["distilled"]} == tables.pop("distilled")
    assert (steered["draft_length"], steered["steering"], steered["steering_norm"]) == (8, "up", True)
    assert [{name: one for name, one in table.items() if one != steered[name]} for table in tables.values()] == [
        {}, {"frozen": True}, {"offsets": "block"}, {"steering": "after"}, {"steering": "conditional"},
        {"steering_norm": False},
    ]  # fmt: skip


def test_the_command(finished, verifier_folder, prose):
    """Its runs are finished."""
    out, results = finished[1:3]
    options = ["all", "--verifier", str(verifier_folder), "--data", f"prose={prose['prose']}", "--out", str(out)]
    options += ["--config", str(out.parent / "runs.toml"), "--runs", "first", "--seeds", "1"]
    found = CliRunner().invoke(app, [*options, "--json"])
    assert found.exit_code == 0, found.output
    expected = [one for one in results if (one.name, one.seed) == ("first", 1)]
    assert json.loads(found.stdout.splitlines()[-1]) == json.loads(json.dumps([one.to_dict() for one in expected]))
    assert results_table(expected) in CliRunner().invoke(app, options).stdout
    assert len(json.loads((out / RESULTS).read_text())) == len(results)  # the folder's, not this call's


def test_each_run_goes_on_with_its_best_rate():
    """By the first seed's chains; the other runs and seeds do not matter."""
    recipe = CompareRecipe(
        {"a": RunTable("eagle"), "b": RunTable("griffin", {"passes": 2})},
        "features-tiny-short",
        seeds=(3, 4),
        rates=(0.1, 0.2),
    )
    tried = recipe.at_every_rate()
    assert list(tried.runs) == ["a at 0.1", "a at 0.2", "b at 0.1", "b at 0.2"]
    assert tried.seeds == (3,)
    assert [tried.recipe_of(name, 3).lr for name in tried.runs] == [0.1, 0.2, 0.1, 0.2]
    tokens = {
        ("a at 0.1", 3): 2.0,
        ("a at 0.2", 3): 1.5,
        ("b at 0.1", 3): 1.1,
        ("b at 0.2", 3): 1.2,
        ("a at 0.2", 4): 9.0,
    }
    results = [Result(name, seed, "eagle", 1, 1, 1.0, {}, {}, {"x": value}) for (name, seed), value in tokens.items()]
    best = recipe.at_best_rates(results)
    assert (list(best.runs), best.seeds) == (["a at 0.1", "b at 0.2"], (3, 4))
    assert best.recipe_of("b at 0.2", 4).drafter.passes == 2


def test_rates_that_no_run_can_have_are_refused():
    runs = {"a": RunTable("eagle")}
    for rates in ((0.0,), (-1.0, 1.0), (0.1, 0.1)):
        with pytest.raises(UsageError, match="positive and all different"):
            CompareRecipe(runs, rates=rates)
    with pytest.raises(UsageError, match="starts from another one"):
        CompareRecipe({**runs, "b": RunTable("eagle", start="a")}, rates=(0.1,)).at_every_rate()
    with pytest.raises(UsageError, match="muon, has rates of its own"):
        CompareRecipe({"a": RunTable("lyanna", lr=0.1)}, "lyanna-tiny-short").recipe_of("a", 0)
