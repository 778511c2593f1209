"""Peers under load: blocks in turns, figures from times of outputs, loops of OpenVINO and llama.cpp, the command."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.standins import peers

from redraft.bench.load import BLOCKS
from redraft.bench.peers import command, turns
from redraft.bench.peers.base import PLAIN, Asked, Continued, PeerError, PeerModel
from redraft.bench.peers.llama_server import LlamaServer
from redraft.bench.peers.load import load_figures, take_blocks, timing
from redraft.bench.peers.openvino import OpenVinoServer
from redraft.bench.peers.ours import NAME
from redraft.bench.peers.turns import Key, Results
from redraft.bench.peers.worker import Opener, Turn, Worker
from redraft.errors import UsageError

OURS, THEIRS = Key(NAME, "int8"), Key("peer", "int8")
PROMPTS = [Asked((number,), 2) for number in range(8)]
Block = Turn[list[Continued]]


def block(seconds: float, tokens: int = 4) -> Block:
    """Two texts that begin at 10 seconds; outputs come after 100 ms and at the end."""
    served = [Continued(10.0, tokens, [10.1, 10.0 + seconds]) for _ in range(2)]
    return Turn(served, cpu_seconds=4.0, wall_seconds=2.0, idle_cpu_seconds=0.03)


class Serving:
    """Writes down its blocks, and fails at the block `fails`."""

    def __init__(
        self, key: Key, modes: tuple[str, ...], log: list[tuple[str, str, list[int]]], fails: int = -1
    ) -> None:
        self.key, self.modes, self.log, self.fails, self.served = key, modes, log, fails, 0

    def serve(self, mode: str, asked: Sequence[Asked]) -> Block:
        self.served += 1
        if self.served == self.fails:
            raise PeerError("broke")
        self.log.append((self.key.name, mode, [one.token_ids[0] for one in asked]))
        return block(1.0)


@pytest.mark.parametrize("fails", [1, 3, -1])
def test_blocks_are_the_same_for_all_and_their_order_rotates(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0)
    log: list[tuple[str, str, list[int]]] = []
    workers = {OURS: Serving(OURS, (PLAIN, "ngram"), log), THEIRS: Serving(THEIRS, (PLAIN,), log, fails)}
    results = take_blocks(workers, PROMPTS, 2, lambda line: None)
    blocks = [log[i : i + 3] for i in range(0, len(log), 3)]
    if fails == -1:
        assert [[name for name, _, _ in one] for one in blocks[:3]] == [
            [NAME, NAME, "peer"], [NAME, "peer", NAME], ["peer", NAME, NAME],
        ]  # fmt: skip
        assert all(len({str(prompts) for _, _, prompts in one}) == 1 for one in blocks)
        assert [one[0][2] for one in blocks[:4]] == [
            [0, 1], [0, 1, 2, 3, 4, 5], [6, 7, 0, 1, 2, 3], [4, 5, 6, 7, 0, 1],
        ]  # fmt: skip
        assert [len(found) for modes in results.turns.values() for found in modes.values()] == [BLOCKS] * 3
    else:
        assert results.failed == {THEIRS: "broke"}
        assert list(results.turns) == [OURS]
        assert workers[THEIRS].served == fails
        assert [len(found) for found in results.turns[OURS].values()] == [BLOCKS] * 2


def test_figures_of_paired_blocks() -> None:
    ours = {PLAIN: [block(1.0)] * BLOCKS, "ngram": [block(0.5)] * BLOCKS}
    results = Results({OURS: ours, THEIRS: {PLAIN: [block(2.0, 6)] * BLOCKS}})
    found = load_figures(results, {OURS: {"threads": 2}, THEIRS: {}})
    peer = found["peer int8"]
    assert timing(block(1.0)) == pytest.approx((8, 1.0))
    figures = peer["modes"][PLAIN]
    assert (figures["outputs"], figures["tokens"], figures["tokens_per_second"]) == (12, 72, pytest.approx(6))
    assert figures["time_to_first_token_ms"] == pytest.approx({"p50": 100, "p99": 100})
    assert figures["time_between_outputs_ms"] == pytest.approx({"p50": 1900, "p99": 1900})
    ratios = {mode: (each["ratio"], *each["interval"]) for mode, each in figures["over"].items()}
    assert ratios == {PLAIN: pytest.approx([8 / 6] * 3), "ngram": pytest.approx([16 / 6] * 3)}
    assert (peer["busy_threads"], peer["idle_cpu_ms"]) == pytest.approx((2, 30))
    assert found[f"{NAME} int8"]["modes"]["ngram"]["over"] == {}


def test_a_worker_serves_prompts_at_once_and_an_early_end_is_an_error() -> None:
    model = PeerModel(Path("none"), "fp32", threads=2, context=9, max_num_seqs=3)
    with closing(Worker(partial(peers.CountingServer, model))) as worker:
        assert worker.settings == {"max_num_seqs": 3, "context": 9}
        turn = worker.serve(PLAIN, [Asked((1,), 2), Asked((2,), 3)])
        assert [one.tokens for one in turn.decoded] == [2, 3]
        with pytest.raises(PeerError, match="expected 21 new tokens, found 20"):
            worker.serve(PLAIN, [Asked((1,), 20), Asked((1,), 21)])


class FakeHandle:
    """A request of the fake pipeline: its outputs wait until they are read."""

    def __init__(self, left: int) -> None:
        self.left, self.unread = left, 0

    def can_read(self) -> bool:
        return self.unread > 0

    def read(self) -> dict[int, Any]:
        tokens, self.unread = self.unread, 0
        return {0: SimpleNamespace(generated_ids=[7] * tokens)}

    def get_status(self) -> str:
        return "running" if self.left else "finished"


class FakePipeline:
    """Has a token for each request of a step, from the step after its prompt's. `most` ran at once."""

    def __init__(self, path: str, scheduler: Any, device: str, properties: Mapping[str, Any]) -> None:
        assert not scheduler.enable_prefix_caching
        self.running: list[tuple[int, FakeHandle]] = []
        self.most: list[int] = []

    def add_request(self, number: int, tokens: Any, config: Any) -> FakeHandle:
        assert number not in [other for other, _ in self.running]
        self.running.append((number, FakeHandle(config.max_new_tokens)))
        return self.running[-1][1]

    def step(self) -> None:
        self.most.append(len(self.running))
        for _, handle in self.running:
            handle.left, handle.unread = handle.left - 1, handle.unread + 1
        self.running = [pair for pair in self.running if pair[1].left]


def test_openvino_runs_as_many_as_it_was_opened_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next prompt is submitted after the step that ended one."""
    genai, core = ModuleType("openvino_genai"), ModuleType("openvino")
    genai.SchedulerConfig = partial(SimpleNamespace, max_num_batched_tokens=256)
    genai.ContinuousBatchingPipeline = FakePipeline
    genai.GenerationConfig = SimpleNamespace
    genai.GenerationStatus = SimpleNamespace(RUNNING="running")
    core.Tensor = list
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", core)
    server = OpenVinoServer(PeerModel(Path("m"), "int8", threads=2, context=9, max_num_seqs=2))
    found = server.decode(PLAIN, [Asked((1,), tokens) for tokens in (3, 1, 2, 1)])
    assert [(one.tokens, len(one.outputs)) for one in found] == [(3, 3), (1, 1), (2, 2), (1, 1)]
    assert server._pipeline.most == [2, 2, 2, 1]
    assert found[1].outputs[0] <= found[2].submitted


class FakeLlama:
    """Sends chunks as llama.cpp's server does, the last one without text. It refuses long prompts."""

    def __init__(self, params: Any) -> None:
        assert (params.n_ctx, params.n_parallel) == (512, 2)
        self.running, self.most, self.lock = 0, 0, threading.Lock()
        self.both = threading.Barrier(2)

    def handle_completions(self, request: Mapping[str, Any], heard: Callable[[dict[str, Any]], None]) -> None:
        assert (request["cache_prompt"], request["ignore_eos"]) == (False, True)
        if len(request["prompt"]) > 9:
            heard({"error": {"message": "too long"}})
            return
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.both.wait(60)
        for _ in range(request["n_predict"]):
            heard({"choices": [{"finish_reason": None}]})
        with self.lock:
            self.running -= 1
        usage = {"completion_tokens": request["n_predict"]}
        heard({"choices": [{"finish_reason": "length"}], "usage": usage})


def test_llama_has_a_thread_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    cpp = ModuleType("xllamacpp")
    cpp.CommonParams = lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    cpp.Server, cpp.get_system_info = FakeLlama, lambda: "CPU : AVX2 = 1 | "
    monkeypatch.setitem(sys.modules, "xllamacpp", cpp)
    server = LlamaServer(PeerModel(Path("m"), "int8", threads=2, context=9, max_num_seqs=2))
    found = server.decode(PLAIN, [Asked((1,), tokens) for tokens in (3, 1, 2, 2)])
    assert [(one.tokens, len(one.outputs)) for one in found] == [(3, 3), (1, 1), (2, 2), (2, 2)]
    assert server._server.most == 2
    with pytest.raises(PeerError, match="too long"):
        server.decode(PLAIN, [Asked((1,) * 10, 1)])


class Inside:
    """A worker in this process."""

    def __init__(self, opener: Opener) -> None:
        self.decoder: Any = opener()
        self.modes, self.settings = self.decoder.modes, self.decoder.settings

    def serve(self, mode: str, asked: Sequence[Asked]) -> Block:
        found = self.decoder.decode(mode, asked)
        assert [one.tokens for one in found] == [one.count for one in asked]
        return Turn(found, 1.0, 1.0, 0.0)

    def close(self) -> None:
        """Do nothing."""


Measure = Callable[..., None]


@pytest.fixture
def measure(lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The command on two prompts with stand-ins, given further options."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(command, "SERVERS", (peers.COUNTING_SERVER, peers.BROKEN, peers.ABSENT))
    monkeypatch.setattr(command, "PEERS", (peers.OTHER,))
    monkeypatch.setattr(command, "Worker", Inside)
    prompts, checkpoint = tmp_path / "prompts.jsonl", tmp_path / "checkpoint"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcd", "efgh")))
    checkpoint.mkdir()

    def run(*options: str) -> None:
        given = ["--engines", lyanna_bundle, "--checkpoint", checkpoint, "--prompts", prompts, "--max-new-tokens", "9"]
        monkeypatch.setattr(sys, "argv", ["peers", *map(str, given), *options])
        command.main()

    return run


def test_the_command_measures_batches_and_fails_for_the_rest(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerError, match=r"^not measured: batch 2, broken fp32$"):
        measure("--batch", "2", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == {"batch 2, broken fp32": "no fp32 for you"}
    assert found["left_out"] == {"absent": "pip install absent"}
    assert list(found["batches"]["2"]) == [f"{NAME} fp32", "counter fp32"]
    assert list(found["batches"]["2"][f"{NAME} fp32"]["modes"]) == [PLAIN, "ngram+lyanna"]
    figures = found["batches"]["2"]["counter fp32"]["modes"][PLAIN]
    assert figures["tokens_per_second"] == pytest.approx(6 * 9 / 0.9)
    assert list(figures["over"]) == [PLAIN, "ngram+lyanna"]
    assert (found["prompts"], found["new_tokens"]) == (2, 18)


def test_the_command_prints_a_table(measure: Measure, capsys: pytest.CaptureFixture[str]) -> None:
    measure("--batch", "1,2", "--peers", "counter")
    out = capsys.readouterr().out
    assert "| 2 | counter fp32 | plain | 60.00 | 100 / 100 | 100 / 100 | plain " in out
    assert f"| 1 | {NAME} fp32 | ngram+lyanna | " in out
    assert "- batch 2, counter fp32: {'max_num_seqs': 2, " in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", "1,3"), "--batch 3 needs 3 prompts, found 2"),
        (("--batch", "1", "--draft", "."), "--batch takes no --draft"),
        (("--batch", "1", "--peers", "other"), "other cannot be measured this way; give counter, broken, absent"),
        (("--batch", "1", "--peers", "absent"), r"^absent is not installed"),
    ],
)
def test_bad_usage(measure: Measure, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(*options)
