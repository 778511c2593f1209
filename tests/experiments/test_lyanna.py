"""The ablations' arithmetic and plumbing, on graphs, traces and drafters small enough to check by hand."""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.export.drafters.tiny import arrays
from torch import nn
from transformers import LlamaConfig

from experiments.lyanna import __main__ as lyanna
from experiments.lyanna import latency, resampling, traces, training
from experiments.lyanna.acceptance import VARIANTS
from experiments.lyanna.acceptance import tables as acceptance_tables
from experiments.lyanna.head import TOGETHER, find_head, needed, outputs_of, write_stages
from experiments.lyanna.objectives import TableObjective
from experiments.lyanna.parts import cuts, split_runs
from experiments.lyanna.resampling import FRESH, Variant, decode_in_turns, drafter_settings, sources, speed
from experiments.lyanna.table import Form, recipe_text, same_choices
from experiments.lyanna.text import render
from experiments.lyanna.training import FULL, Lines, Texts, open_texts, recipe_of, train_variant
from redraft import names
from redraft.bench.prompts import Prompt
from redraft.engines.manifest import GraphRecord
from redraft.engines.recipes import load_recipe
from redraft.errors import TrainingError
from redraft.export.drafters.checkpoint import Identity, TokenData
from redraft.export.drafters.draft_vocabulary import DraftVocabulary
from redraft.export.drafters.lyanna import LyannaConfig
from redraft.export.drafters.lyanna_token_info import make_tables
from redraft.methods.lyanna import METHOD, LyannaShape
from redraft.names import TensorSpec
from redraft.runtime import Generation
from redraft.runtime.metrics import Metrics
from redraft.runtime.trace import Replay
from redraft.train.acceptance import greedy_rows
from redraft.train.batches import Batch
from redraft.train.drafter_config import SelfText
from redraft.train.objectives import find_training
from redraft.train.objectives.lyanna import LyannaObjective, LyannaTable

VOCABULARY, HIDDEN, WIDTH = 24, 8, 3
CONFIG = LyannaConfig(
    hidden_size=HIDDEN, vocab_size=VOCABULARY, intermediate_size=12, heads=2, kv_heads=1, head_dim=4, rank=3, steps=3
)
RECIPE = find_training("lyanna").recipe(
    weights={"a": 1.0},
    steps=8,
    batch_tokens=32,
    seq_len=8,
    decay_seq_len=8,
    warmup_steps=1,
    evaluate_every=4,
    drafter=LyannaTable(rank=3, chain=3),
    self_text=SelfText(prompt_tokens=3, new_tokens=9, text=1.0, greedy=0.0, sampled=0.0),
)


class FakeVerifier(nn.Module):
    """Its features are embeddings, its logits their product with a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, use_cache):
        return SimpleNamespace(logits=self.head(self.embed(tokens)))


@pytest.fixture
def verifier():
    return FakeVerifier()


@pytest.fixture
def exact(verifier):
    return filled(LyannaObjective(verifier, CONFIG))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))


def filled(objective):
    """The objective with weights other than zero and one."""
    torch.manual_seed(0)
    for parameter in objective.drafter.parameters():
        nn.init.normal_(parameter, std=0.5)
    return objective.requires_grad_(False)


def drafts(objective, tokens):
    batch = whole(tokens)
    with torch.no_grad():
        return torch.stack(list(objective.drafts(batch, objective.states(batch))))


def whole(tokens):
    """A batch whose drafts start everywhere."""
    return Batch.whole(tokens, ("",) * len(tokens), CONFIG.steps)


def tables_of(exact, counts, size, form="lowrank"):
    sizes = dict(hidden=HIDDEN, vocabulary=VOCABULARY, kv_heads=1, head_dim=4, steps=3, width=2, nodes=5, rank=3)
    shape = LyannaShape(**sizes, resample_nodes=3, token_info=form, draft_vocabulary=size)
    embedding, vocabulary = exact.verifier.embed.weight.detach().numpy(), DraftVocabulary.of(TokenData(counts), size)
    return arrays((*make_tables(exact.drafter.token_info, iter([embedding]), vocabulary, shape), *vocabulary.tables()))


def test_only_tokens_of_the_draft_vocabulary_are_drafted(exact, tokens):
    """After such a token their logits are the drafter's own. Other tokens before share a row."""
    stored = TableObjective(exact, tables_of(exact, torch.arange(VOCABULARY), 6))
    assert stored.vocabulary.tokens.tolist() == list(range(18, 24))
    logits, own = drafts(stored, tokens), drafts(exact, tokens)[..., 18:]
    assert logits.shape == own.shape
    for step, gaps in enumerate((logits - own).abs().amax(-1)):
        before = tokens[:, step + 1 : gaps.shape[1] + step + 1] >= 18
        assert before.any()
        assert not before.all()
        assert (gaps[before] < 1e-4).all()
        assert (gaps[~before] > 1e-3).all()


def test_a_table_of_a_drafter_with_a_logit_scale_is_the_same(verifier, tokens):
    sharp = LyannaConfig(**{**vars(CONFIG), "draft_logit_scale": 4.0})
    exact = filled(LyannaObjective(verifier, sharp))
    stored = TableObjective(exact, tables_of(exact, torch.ones(VOCABULARY), VOCABULARY))
    torch.testing.assert_close(drafts(stored, tokens), drafts(exact, tokens), rtol=1e-4, atol=1e-4)


def test_stored_forms_choose_nearly_as_fp32_does(exact, tokens):
    texts, counts = [whole(tokens[:1])], torch.ones(VOCABULARY)
    stored = {
        form: TableObjective(exact, tables_of(exact, counts, VOCABULARY, form)) for form in ("lowrank", "fp16", "fp8")
    }
    shares = {form: same_choices(exact, objective, texts) for form, objective in stored.items()}
    assert shares["lowrank"] == {"same_likeliest": 1.0, "same_of_widest": 1.0}
    assert shares["fp16"]["same_of_widest"] > 0.9
    nothing = TableObjective(exact, {f"{names.TOKEN_INFO}table": np.zeros((VOCABULARY, VOCABULARY), np.float16)})
    assert same_choices(exact, nothing, texts)["same_of_widest"] < shares["fp8"]["same_of_widest"]


@pytest.fixture
def texts(verifier, tmp_path):
    """A stream that counts upwards, so that training can learn it."""
    config = LlamaConfig(
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=12, head_dim=4, hidden_size=HIDDEN
    )
    found = SimpleNamespace(config=config, hidden_size=HIDDEN, vocab_size=VOCABULARY, model=verifier)
    stream = np.arange(400, dtype=np.uint16) % VOCABULARY
    counts = np.bincount(stream, minlength=VOCABULARY)
    held_out = greedy_rows(stream[:48].reshape(4, 12), RECIPE.self_text.prompt_tokens - 1, RECIPE.drafter.chain)
    return Texts(tmp_path, found, RECIPE, "x", {"a": stream}, {"a": held_out}, counts, Lines())


def test_variants_train_alike_and_are_read_again(texts, capsys):
    measured, objective = train_variant(texts, FULL)
    assert [line["step"] for line in measured] == [4, 8]
    capsys.readouterr()
    again, read = train_variant(texts, FULL)
    assert "step" not in capsys.readouterr().err
    assert again == measured
    for name, tensor in objective.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor)
    other, ablated = train_variant(texts, "without", token_info=False)
    assert ablated.drafter.token_info is None
    assert set(other[-1]["acceptance"]["a"]) == {"top", "wide", "starts"}
    assert "without: step 8" in capsys.readouterr().err


def options(out, **changes):
    values = dict(
        config="lyanna-tiny", steps=40, seed=None, rows=5, held_out_rows=2, batch_tokens=512, init="random", out=out,
        threads=1, data=["code=x", "prose=y"], verifier=out,
    )  # fmt: skip
    return Namespace(**{**values, **changes})


def test_a_recipe_with_the_options_fields(tmp_path):
    recipe = recipe_of(options(tmp_path), {"code": "x", "notes": "y"})
    assert (recipe.steps, recipe.batch_tokens, recipe.evaluate_every) == (40, 512, 10)
    assert (recipe.self_text.rows, recipe.self_text.held_out_rows, recipe.drafter.init) == (5, 2, "random")
    assert recipe.weights == {"code": 0.45, "notes": 1.0}


def test_texts_of_another_run_are_refused(tmp_path, monkeypatch):
    stream = {"code": np.arange(9)}
    store = SimpleNamespace(streams=lambda lookahead: stream, held_out=lambda: {"code": np.arange(80)[None]})
    monkeypatch.setattr(training, "TextStore", lambda *arguments: store)
    monkeypatch.setattr(training, "load_corpora", lambda sources, recipe: {})
    monkeypatch.setattr(training.torch, "set_num_threads", lambda threads: None)
    found = SimpleNamespace(identity=Identity(("w",), "t"), vocab_size=12)
    monkeypatch.setattr(training, "open_verifier", lambda path, device: found)
    assert open_texts(options(tmp_path)).counts.sum() == 9
    open_texts(options(tmp_path, steps=80))
    with pytest.raises(TrainingError, match="self_text"):
        open_texts(options(tmp_path, rows=6))
    found.identity = Identity(("other",), "t")
    with pytest.raises(TrainingError, match="another verifier"):
        open_texts(options(tmp_path))


def accepted(*top):
    return {"top": list(top), "wide": [1.0] * len(top), "starts": [9] * len(top)}


def test_tables_of_training_name_every_variant_and_show_signs():
    kinds = {"a": accepted(0.9, 0.6), "b": accepted(0.7, 0.4)}
    figures = {"steps": 8, "kinds": kinds, "mean": {"top": [0.8, 0.5], "wide": [1.0, 1.0]}}
    first = next(iter(acceptance_tables({"variants": dict.fromkeys(VARIANTS, figures)}).values()))
    assert ["mean", "without-token-info", "80.0 %", "50.0 %", ""] in first
    assert len(first) == 1 + 3 * len(VARIANTS)


def draft_model(path):
    """in -> norm -> states -(head)-> product -> chain_logits -> tree.tokens."""
    weight = np.random.default_rng(0).standard_normal((HIDDEN, VOCABULARY)).astype(np.float32)
    nodes = [
        helper.make_node("Relu", ["in"], ["states"], name="node_layer"),
        helper.make_node("MatMul", ["states", "head"], ["product"], name="node_head"),
        helper.make_node("Mul", ["product", "scale"], [names.CHAIN_LOGITS], name="node_scale"),
        helper.make_node("ArgMax", [names.CHAIN_LOGITS], [names.TREE_TOKENS], name="node_tree", axis=-1),
    ]
    initializers = [
        numpy_helper.from_array(weight, "head"), numpy_helper.from_array(np.array([2.0], np.float32), "scale"),
    ]  # fmt: skip
    given = [
        helper.make_tensor_value_info(names.TREE_TOKENS, TensorProto.INT64, [1, 3, 1]),
        helper.make_tensor_value_info(names.CHAIN_LOGITS, TensorProto.FLOAT, [1, 3, VOCABULARY]),
    ]
    taken = [helper.make_tensor_value_info("in", TensorProto.FLOAT, [1, 3, HIDDEN])]
    graph = helper.make_graph(nodes, "draft", taken, given, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), str(path))
    return graph


def test_stages_have_the_sizes_of_the_draft_and_compute_their_part(tmp_path: Path):
    draft_model(tmp_path / "draft.onnx")
    paths = write_stages(tmp_path / "draft.onnx", HIDDEN, VOCABULARY, WIDTH, tmp_path)
    x = np.random.default_rng(1).standard_normal((1, 5, HIDDEN)).astype(np.float32)
    logits, probabilities, best, whole = (
        ort.InferenceSession(str(paths[stage]), providers=["CPUExecutionProvider"])
        for stage in ("head", "softmax", "top_k", TOGETHER)
    )
    scores = logits.run(None, {"in": x})[0]
    assert scores.shape == (1, 5, VOCABULARY)
    shares = probabilities.run(None, {"in": scores})[0]
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    values, chosen = best.run(None, {"in": shares})
    for found, expected in zip(whole.run(None, {"in": x}), (values, chosen), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for stage in paths:
        session = ort.InferenceSession(str(paths[stage]), providers=["CPUExecutionProvider"])
        outputs = outputs_of(stage, 5, VOCABULARY, WIDTH)
        assert [output.name for output in session.get_outputs()] == list(outputs)
        run = session.run(None, {"in": x if stage in ("head", TOGETHER) else scores})
        assert [value.shape for value in run] == [array.shape for array in outputs.values()]


def test_a_draft_is_cut_after_the_layer_and_after_the_head(tmp_path: Path):
    draft_model(tmp_path / "draft.onnx")
    outputs = (
        TensorSpec(names.TREE_TOKENS, "int64", (1, 3, 1)),
        TensorSpec(names.CHAIN_LOGITS, "float32", (1, 3, VOCABULARY)),
    )
    shape = SimpleNamespace(steps=3, hidden=HIDDEN)
    found = cuts(tmp_path / "draft.onnx", GraphRecord("draft.onnx", (), outputs), shape)
    ops = {part: [node.op_type for node in model.graph.node] for part, (model, _) in found.items()}
    assert ops == {"layer": ["Relu"], "head": ["Relu", "MatMul", "Mul"], "tree": ["Relu", "MatMul", "Mul", "ArgMax"]}
    for model, specs in found.values():
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        assert [output.name for output in session.get_outputs()] == [spec.name for spec in specs]


def test_a_profile_is_split_by_the_inputs_of_the_head(tmp_path: Path):
    graph = draft_model(tmp_path / "draft.onnx")
    assert find_head(graph).name == "node_head"
    assert needed(graph, [names.CHAIN_LOGITS]) == {"node_layer", "node_head", "node_scale"}

    def kernel(name, ts, dur):
        return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur}

    def run(ts):
        return {"cat": "Session", "name": "model_run", "ts": ts, "dur": 1000}

    events = [
        run(0), kernel("node_tree", 10, 1), kernel("made_before", 20, 20), kernel("node_layer/Fused/", 50, 100),
        kernel("node_head", 200, 300), kernel("node_scale", 600, 30), kernel("made_after", 700, 50),
        run(5000), kernel("node_head", 5001, 400),
    ]  # fmt: skip
    first, second = split_runs(events, graph)
    parts = {"layer": 0.12, "head": 0.3, "tree": 0.081, "rest": 0.499, "call": 1.0}
    assert first == {name: pytest.approx(ms) for name, ms in parts.items()}
    assert (second["head"], second["layer"]) == (0.4, 0.0)


def test_parts_are_differences_of_cuts():
    upto = {"layer": {"median": 2.0, "least": 1.0}, "head": {"median": 3.0, "least": 1.5},
            "tree": {"median": 7.0, "least": 2.5}}  # fmt: skip
    found = latency.differences(upto)
    assert [found[part]["median"] for part in ("layer", "head", "tree", "draft")] == [2.0, 1.0, 4.0, 7.0]


def test_an_eagle_like_draft_pays_its_head_after_every_step():
    def ways(rows):
        return {"one_pass": {TOGETHER: {"median": 1.0 + rows / 10}}, "iterative": {TOGETHER: {"median": 1.1 * rows}}}

    logits = {str(rows): ways(rows) for rows in range(1, 7)}
    found = latency.from_parts(5.0, logits, steps=3, width=4)
    assert found["lyanna"] == pytest.approx(5 + 1.3)
    assert found["eagle_like_chain"] == pytest.approx(5 + 3.3)
    assert found["eagle_like_tree"] == pytest.approx(5 + 1.1 + 2 * 1.4)


def generation(rate, tokens=20, accepted=5, steps=10):
    metrics = Metrics(steps, steps, 2 * accepted, accepted, 1 + accepted / steps, 0.5, (), rate, 1.0, 0.1, {})
    return Generation("", tuple(range(tokens)), "length", 3, metrics)


def test_speed_is_of_pairs_and_leaves_short_outputs_out():
    fresh = [generation(100.0), generation(200.0), generation(100.0, tokens=3)]
    resampled = [generation(110.0, accepted=8), generation(240.0, accepted=8), generation(900.0, 3, accepted=8)]
    found = speed(resampled, fresh)
    assert found["over_fresh"]["ratio"] == pytest.approx((1 / 100 + 1 / 200) / (1 / 110 + 1 / 240))
    assert found["over_fresh"]["count"] == 2
    assert found["mean_acceptance_length"] == pytest.approx(1.8)
    assert found["other_texts"] == 0
    assert speed([generation(1.0, tokens=21)], [generation(1.0)])["other_texts"] == 1


def test_traces_give_the_resampled_and_accepted_nodes():
    played = Replay()
    played.steps.update(fresh=6, resample=2)
    played.nodes.update(fresh=48, resample=8)
    played.accepted.update(fresh=9, resample=1)
    found = sources([played, played])
    assert found["resampled_steps"] == 0.25
    assert found["trees"]["fresh"] == {"steps": 12, "nodes_per_tree": 8.0, "accepted_per_tree": 1.5}
    assert found["trees"]["resample"]["accepted_per_tree"] == 0.5
    assert sources([]) == {"resampled_steps": 0.0, "trees": {}}


def test_variants_take_turns_in_an_order_that_flips(capsys):
    order = []

    def decoder(name):
        def decode(prompt):
            order.append((name, prompt.id))
            return generation(1.0)

        return decode

    variants = [Variant("fixed", FRESH), Variant("fixed", "other")]
    prompts = [Prompt(str(i), "k", "") for i in range(2)]
    decoded = decode_in_turns({variant: decoder(variant.drafts) for variant in variants}, prompts)
    assert order[2:] == [(FRESH, "0"), ("other", "0"), ("other", "1"), (FRESH, "1")]
    assert [len(found) for found in decoded.values()] == [2, 2]


def test_only_the_drafts_differ():
    settings = drafter_settings((0, 2))
    assert settings[FRESH] == {"resample": False}
    assert settings["resampling, r = 2"] == {"resample": True, "threshold": 2}
    for options in settings.values():
        METHOD.parse_options(options)


class FakeRuntime:
    """Decodes as fast as it resamples."""

    def __init__(self, settings):
        self.settings = settings

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def encode(self, text):
        return [len(text)]

    def generate(self, prompts, params, speculation, trace=None):
        assert speculation.method == "lyanna"
        if trace is not None:
            trace.write(json.dumps({"request": 0, "prompt": [1], "first": 2, "table_ms": [0, 1]}) + "\n")
            source = "resample" if self.settings["resample"] else "fresh"
            step = {"position": 1, "source": source, "tokens": [2, 3], "parents": [-1, 0], "said": [3, 4]}
            trace.write(json.dumps({"request": 0, **step, "path": [1], "committed": [3, 4]}) + "\n")
        return [generation(150.0 if self.settings["resample"] else 100.0)]


def test_resampling_from_the_command_line(tmp_path, monkeypatch, capsys):
    def opened(path, threads, drafter_options):
        return FakeRuntime(drafter_options["lyanna"])

    monkeypatch.setattr(resampling.Runtime, "open", opened)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "1", "category": "k", "turns": ["x"]}\n')
    command = ["resampling", "--engines", "e", "--prompts", str(prompts), "--thresholds", "1", "--json"]
    lyanna.main(command)
    found = json.loads(capsys.readouterr().out)["controllers"]["adaptive"]
    assert found["resampling, r = 1"]["over_fresh"]["ratio"] == 1.5
    assert found["resampling, r = 1"]["resampled_steps"] == 1.0
    assert found[FRESH]["resampled_steps"] == 0.0
    lyanna.main(command[:-1])
    assert "resampling, r = 1  150.0     1.500" in capsys.readouterr().out


def test_resampling_decodes_chats_as_tables_of_traces_do(tmp_path, monkeypatch, capsys):
    asked = []

    class Chatting(FakeRuntime):
        max_model_len = 99
        tokenizer = Namespace(
            check_chat_template=lambda: None,
            apply_chat_template=lambda messages: messages[0]["content"],
            encode=lambda text, special_tokens: [7] * len(text),
        )

        def encode(self, ids):
            return ids

        def generate(self, prompts, params, speculation, trace=None):
            asked.extend(prompts)
            return super().generate(prompts, params, speculation, trace)

    monkeypatch.setattr(
        resampling.Runtime, "open", lambda path, threads, drafter_options: Chatting(drafter_options["lyanna"])
    )
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["xyz"]}\n')
    lyanna.main(["resampling", "--engines", "e", "--prompts", str(prompts), "--chat", "--json"])
    assert json.loads(capsys.readouterr().out)["chat"] is True
    assert {tuple(ids) for ids in asked} == {(7, 7, 7)}


def manifest(nodes):
    """A bundle's manifest of a drafter that was built for trees of so many nodes, the root included, two deep."""
    shape = LyannaShape(
        hidden=8, vocabulary=16, kv_heads=1, head_dim=8, steps=2, width=4, nodes=nodes, resample_nodes=4,
        token_info="fp16", draft_vocabulary=16, rank=2,
    )  # fmt: skip
    return SimpleNamespace(drafters={"lyanna": SimpleNamespace(shape=asdict(shape))})


def test_traces_count_all_requests_by_kind_and_bundle(tmp_path, monkeypatch, capsys):
    """Each run has its own request 0; the shares of all kinds are of their sums."""
    asked = []

    class Drafting(FakeRuntime):
        def generate(self, prompts, params, speculation, trace=None):
            asked.append(speculation.budget)
            (ids,) = prompts
            accepted = ids == [1]
            step = {"position": 1, "source": "fresh", "tokens": [2, 3], "parents": [-1, 0], "log_probs": [0, -1]}
            end = {"said": [3, 4], "path": [1], "committed": [3, 4]} if accepted else {
                "said": [5, 4], "path": [], "committed": [5]}  # fmt: skip
            lines = {"request": 0, "prompt": [1], "first": 2, "table_ms": [0, 1]}, {"request": 0, **step, **end}
            trace.write("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(traces, "load_manifest", lambda folder: manifest(nodes=33 if folder.name == "one" else 9))
    monkeypatch.setattr(
        traces.Runtime, "open", lambda path, threads, drafter_options: Drafting(drafter_options["lyanna"])
    )
    prompts = tmp_path / "p.jsonl"
    lines = [{"id": str(i), "category": kind, "turns": [text]} for i, (kind, text) in enumerate(
        [("a", "x"), ("a", "xx"), ("b", "x"), ("b", "x")])]  # fmt: skip
    prompts.write_text("\n".join(map(json.dumps, lines)))
    lyanna.main(["traces", "--engines", "one", "two", "--prompts", str(prompts), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["trees"] == {name: {"nodes": nodes, "depth": 2, "width": 4} for name, nodes in
                               (("one", 16), ("two", 8))}  # fmt: skip
    found = result["bundles"]
    assert (
        found["one"]
        == found["two"]
        == {
            "a": {"acceptance": [0.5], "drafts": 2},
            "b": {"acceptance": [1.0], "drafts": 2},
            "all": {"acceptance": [0.75], "drafts": 4},
        }
    )
    assert set(asked) == {traces.TREE}
    lyanna.main(["traces", "--engines", "one", "--prompts", str(prompts)])
    assert "all   one     75.0 %" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        lyanna.main(["resampling", "--engines", str(tmp_path), "--prompts", str(tmp_path / "none.jsonl")])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("redraft: error: cannot read")


def test_every_part_has_options():
    common = ["--verifier", "v", "--data", "code=stdlib", "--data", "prose=p.txt", "--out", "o"]
    parser = lyanna.parser()
    assert parser.parse_args(["acceptance", *common]).data == ["code=stdlib", "prose=p.txt"]
    assert parser.parse_args(["latency", "--engines", "e"]).turns == 100
    table = ["table", "--verifier", "v", "--drafter", "d", "--prompts", "a", "b", "--vocabularies", "9,3"]
    assert parser.parse_args(table).vocabularies == (9, 3)


def test_a_form_is_a_recipe_that_builds_it(tmp_path):
    wanted = Namespace(verifier=tmp_path, drafter=tmp_path, chain=3, nodes=12)
    (tmp_path / "form.toml").write_text(recipe_text(Form("fp8", 7), wanted), encoding="utf-8")
    built = load_recipe(str(tmp_path / "form.toml")).build.drafters[0]
    expected = {"steps": 3, "nodes": 12, "token_info": "fp8", "draft_vocabulary": 7}
    assert (built.options, built.source) == (expected, str(tmp_path))


def test_a_node_needs_what_its_branches_read():
    """The draft graph adds noise in a branch, which reads tensors of the graph around it."""
    branch = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sum"], name="inner")], "then", [], [])
    other = helper.make_graph([helper.make_node("Identity", ["c"], ["same"], name="other")], "else", [], [])
    nodes = [helper.make_node("Identity", ["x"], [name], name=f"make {name}") for name in ("a", "b", "c", "d", "if")]
    nodes.append(helper.make_node("If", ["if"], ["out"], name="choose", then_branch=branch, else_branch=other))
    graph = helper.make_graph(nodes, "g", [], [])
    assert needed(graph, ["out"]) == {"choose", "make if", "make a", "make b", "make c"}


def test_tables_are_aligned():
    out = io.StringIO(render({"title": [["a", "long"], ["wider", "b"]]}))
    assert out.read() == "title\n\na      long\n-----  ----\nwider  b"


def test_the_commands_that_the_docs_give_are_whole(root):
    """Readers would find an option that a part requires and its command lacks."""
    text = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    commands = re.findall(r"`python -m experiments\.lyanna (.*?)`", text)
    assert {lyanna.parser().parse_args(command.split()).part for command in commands} == set(lyanna.PARTS)
