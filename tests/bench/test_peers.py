"""Measurements of peers: turns, figures, tables, and the command with stand-ins for peers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.runs import LOOP, make_generation
from tests.runtime.fakes import make_runtime
from tests.standins import peers

from redraft.bench.compare import Run
from redraft.bench.peers import command, turns
from redraft.bench.peers.base import DRAFT, NGRAM, PLAIN, Decoded, PeerError
from redraft.bench.peers.figures import figures, markdown
from redraft.bench.peers.ours import NAME, Ours
from redraft.bench.peers.turns import Key, Results, make_questions, take_turns
from redraft.bench.peers.worker import Opener, Turn
from redraft.bench.prompts import BenchPrompt
from redraft.errors import DataError, UsageError

OURS, THEIRS = Key(NAME, "fp32"), Key("peer", "fp32")
SETTINGS = {key: {"threads": 2} for key in (OURS, THEIRS)}
QUESTIONS = [
    Run(BenchPrompt(name, kind, name), [1], {"none": make_generation(tokens=(2, 3, 4))})
    for name, kind in (("a", "x"), ("b", "y"), ("c", "x"))
]


def turn(seconds: float, *tokens: int) -> Turn:
    return Turn(Decoded(tokens or (2, 3, 4), seconds), cpu_seconds=4.0, wall_seconds=2.0, idle_cpu_seconds=0.03)


class Taker:
    """Writes down its turns, and fails at the turn `fails`."""

    def __init__(self, key: Key, log: list[str], fails: int = -1) -> None:
        self.modes = (PLAIN, NGRAM)
        self.key, self.log, self.fails, self.taken = key, log, fails, 0

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Turn:
        self.taken += 1
        if self.taken == self.fails:
            raise PeerError("broke")
        self.log.append(f"{self.key.name} {mode}")
        return turn(1.0)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0)


@pytest.mark.usefixtures("no_pause")
def test_the_order_of_turns_flips_within_a_kind_after_a_warm_up() -> None:
    log: list[str] = []
    results = take_turns({key: Taker(key, log) for key in (OURS, THEIRS)}, QUESTIONS, lambda line: None)
    once = [f"{NAME} plain", f"{NAME} ngram", "peer plain", "peer ngram"]
    assert log == [*once, *once, *once, *once[::-1]]
    assert [len(found) for modes in results.turns.values() for found in modes.values()] == [3] * 4


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("fails", [1, 6])
def test_a_decoder_that_fails_is_left_out_and_the_others_go_on(fails: int) -> None:
    """It fails in the warm-up, or later."""
    log: list[str] = []
    takers = {OURS: Taker(OURS, log), THEIRS: Taker(THEIRS, log, fails)}
    results = take_turns(takers, QUESTIONS, lambda line: None)
    assert results.failed == {THEIRS: "broke"}
    assert list(results.turns) == [OURS]
    assert log.count(f"{NAME} ngram") == 4
    assert takers[THEIRS].taken == fails


def test_questions_are_first_turns_with_our_answers() -> None:
    """The first prompt's answer ends after 9 tokens, the second's after 3, which are too few to time."""
    ends = {b"a"[0]: 9, b"b"[0]: 3}

    def rule(tokens: list[int]) -> int:
        return 257 if len(tokens) >= ends[tokens[0]] + 1 else 100

    runtime = make_runtime(rule)
    eos = runtime.generate([[97]])[0].token_ids
    assert len(eos) == 10
    prompts = [BenchPrompt("p", "k", "a", ("later",)), BenchPrompt("q", "k", "b")]
    (question,) = make_questions(runtime, prompts, 20, chat=False, system=None)
    assert (question.prompt.id, list(question.token_ids), len(question.answer)) == ("p", [97], 10)
    with pytest.raises(DataError, match="no answer has 8 tokens"):
        make_questions(runtime, prompts[1:], 20, chat=False, system=None)


def results() -> Results:
    """Our plain decoding takes 10, 20 and 30 ms a token; the peer's n-grams 20, 20 and 90, its plain decoding more."""
    ours = {PLAIN: [turn(0.02), turn(0.04), turn(0.06)], NGRAM: [turn(0.01), turn(0.02), turn(0.03)]}
    theirs = {PLAIN: [turn(1.0)] * 3, NGRAM: [turn(0.04), turn(0.04, 2, 9, 4), turn(0.18)]}
    return Results({OURS: ours, THEIRS: theirs}, {Key("peer", "int8"): "broke"})


def measured(taken: Results | None = None, questions: Sequence[Run] = QUESTIONS) -> dict:
    found = figures(taken or results(), questions, SETTINGS)
    return {
        "environment": {"threads": 2, "cpu": "a processor"},
        "precisions": ["fp32", "int8"],
        "peers": ["peer", "absent"],
        "versions": {NAME: "1", "peer": "2", "absent": None},
        "left_out": {"absent": "pip install absent"},
        **found,
    }


def test_figures_are_rates_and_ratios_of_the_same_prompts_with_the_best_mode() -> None:
    found = measured()
    decoders, ratios = found["decoders"]["fp32"], found["ratios"]["fp32"]
    assert decoders[NAME]["modes"][PLAIN]["tokens_per_second"] == pytest.approx(50)
    assert (decoders["peer"]["busy_threads"], decoders["peer"]["idle_cpu_ms"]) == pytest.approx((2, 30))
    assert decoders["peer"]["modes"][NGRAM]["differences"] == [{"prompt": "b", "token": 1}]
    assert list(ratios) == ["peer"]
    assert ratios["peer"]["best_mode"] == NGRAM
    modes = ratios["peer"]["modes"]
    assert modes[PLAIN]["all"]["ratio"] == pytest.approx(260 / 120)
    assert modes[PLAIN]["kinds"]["x"]["ratio"] == pytest.approx(220 / 80)
    ngram = modes[NGRAM]["all"]
    assert (ngram["ratio"], ngram["interval"], ngram["count"]) == (pytest.approx(260 / 60), None, 3)
    assert (ngram["rate"], ngram["base_rate"]) == pytest.approx((6 / 0.06, 6 / 0.26))


def test_outputs_of_prompts_with_equal_ids_are_counted_one_by_one() -> None:
    """Files may number their prompts alike."""
    alike = [replace(question, prompt=replace(question.prompt, id="1")) for question in QUESTIONS]
    taken = results()
    taken.turns[THEIRS][NGRAM] = [turn(1.0, 9, 3, 4), turn(1.0), turn(1.0, 2, 3, 9)]
    modes = figures(taken, alike, SETTINGS)["decoders"]["fp32"]["peer"]["modes"]
    assert modes[NGRAM]["differences"] == [{"prompt": "1", "token": 0}, {"prompt": "1", "token": 2}]
    assert modes[PLAIN]["differences"] == []


def test_texts_are_not_compared_if_our_decoder_failed() -> None:
    taken = results()
    del taken.turns[OURS]
    taken.failed[OURS] = "broke"
    found = measured(taken)
    assert found["decoders"]["fp32"]["peer"]["modes"][PLAIN]["differences"] is None
    shown = markdown(found)
    assert "plain not compared, ngram not compared" in shown
    assert f"| {NAME} |  | failed | not measured |" in shown
    assert f"| peer |  | {NAME} failed | failed |" in shown


def test_ratios_are_also_of_answers_that_do_not_loop() -> None:
    """The first two take 80 ms of the peer and 60 of ours, the third 180 and 60."""
    looping = replace(QUESTIONS[2], generations={"none": make_generation(tokens=LOOP)})
    found = measured(questions=[*QUESTIONS[:2], looping])
    ratios = found["ratios"]["fp32"]["peer"]["modes"][PLAIN]
    assert (ratios["all"]["ratio"], ratios["not_looping"]["ratio"]) == pytest.approx((260 / 120, 80 / 60))
    shown = markdown(found)
    assert "| peer | plain | 2.17 (-) of ngram |" in shown
    assert "| peer | plain, not looping | 1.33 (-) of ngram |" in shown
    every = measured(questions=[looping] * 3)
    assert "| peer | plain, not looping | every answer loops |" in markdown(every)


def test_tables_have_a_row_a_library_and_mode_and_a_column_a_precision() -> None:
    lines = markdown(measured()).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert rows == [
        "|  | mode | fp32 | 8 bits |",
        "| --- | --- | --- | --- |",
        f"| {NAME} | plain | 50.00 | not measured |",
        f"| {NAME} | ngram | 100.0 | not measured |",
        "| peer | plain | 2.000 | failed |",
        "| peer | ngram | 23.08 | failed |",
        "| absent |  | not installed | not installed |",
        f"|  | {NAME}'s mode | fp32 | 8 bits |",
        "| --- | --- | --- | --- |",
        "| peer | plain | 2.17 (-) of ngram | failed |",
        "| peer | ngram | 4.33 (-) of ngram | failed |",
        "| absent |  | not installed | not installed |",
    ]
    assert "- absent is not installed: `pip install absent`" in lines
    assert "- peer int8 failed: broke" in lines
    assert [line for line in lines if "plain 3 of 3, ngram 2 of 3" in line]


def test_the_same_mode_is_compared_where_both_have_a_second_model() -> None:
    """Ours takes 1, 2 and 4 seconds, a peer's drafts 2, 6 and 8. Its best mode is another one."""
    ours = {PLAIN: [turn(9.0)] * 3, DRAFT: [turn(1.0), turn(2.0), turn(4.0)]}
    theirs = {PLAIN: [turn(3.0)] * 3, DRAFT: [turn(2.0), turn(6.0), turn(8.0)]}
    found = figures(Results({OURS: ours, THEIRS: theirs}), QUESTIONS, SETTINGS)["ratios"]["fp32"]["peer"]
    assert found["best_mode"] == PLAIN
    assert found["same_mode"][DRAFT]["all"]["ratio"] == pytest.approx(16 / 7)
    assert found["same_mode"][DRAFT]["kinds"]["y"]["ratio"] == pytest.approx(3.0)
    alone = Results({OURS: {PLAIN: ours[PLAIN]}, THEIRS: theirs})
    assert figures(alone, QUESTIONS, SETTINGS)["ratios"]["fp32"]["peer"]["same_mode"] == {}


Measure = Callable[..., None]


@pytest.fixture
def measure(lyanna_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The command on two prompts with stand-ins, given further options."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(turns, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(command, "PEERS", (peers.COUNTER, peers.BROKEN, peers.ABSENT, peers.OTHER))
    prompts, checkpoint = tmp_path / "prompts.jsonl", tmp_path / "checkpoint"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abcd", "efgh")))
    checkpoint.mkdir()

    def run(*options: str) -> None:
        given = ["--engines", lyanna_bundle, "--checkpoint", checkpoint, "--prompts", prompts, "--max-new-tokens", "9"]
        monkeypatch.setattr(sys, "argv", ["peers", *map(str, given), *options])
        command.main()

    return run


def test_the_command_measures_what_works_and_fails_for_the_rest(
    measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerError, match=r"^not measured: broken fp32$"):
        measure("--json")
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == {"broken fp32": "no fp32 for you"}
    assert found["left_out"] == {"absent": "pip install absent"}
    assert list(found["decoders"]["fp32"]) == [NAME, "counter"]
    assert list(found["decoders"]["fp32"][NAME]["modes"]) == [PLAIN, NGRAM, "ngram+lyanna"]
    assert found["decoders"]["fp32"]["counter"]["modes"][PLAIN]["tokens_per_second"] == pytest.approx(40)
    assert found["ratios"]["fp32"]["counter"]["best_mode"] == NGRAM
    assert (found["prompts"], found["new_tokens"]) == (2, 18)


def test_an_answer_whose_tokens_all_come_together_takes_time() -> None:
    """A lookup in a prompt that repeats itself finds it whole, so there is no time between two outputs."""
    ours = Ours.__new__(Ours)
    ours._runtime, ours._methods = make_runtime(lambda tokens: 97), {NGRAM: NGRAM}
    found = ours.decode(NGRAM, [97] * 40, 9)
    assert found.token_ids == (97,) * 9
    assert found.seconds > 0


class Inside:
    """A worker in this process."""

    def __init__(self, opener: Opener) -> None:
        self.decoder = opener()
        self.modes, self.settings = self.decoder.modes, self.decoder.settings

    def decode(self, mode: str, token_ids: Sequence[int], count: int) -> Turn:
        return Turn(self.decoder.decode(mode, token_ids, count), 1.0, 1.0, 0.0)

    def close(self) -> None:
        """Do nothing."""


def test_the_command_prints_tables_of_the_chosen_peers(
    measure: Measure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Worker", Inside)
    measure("--peers", "counter", "other")
    out = capsys.readouterr().out
    assert "| counter | plain | 40.00 |\n| counter | ngram | 80.00 |\n| other |  | not measured |" in out
    assert f"| {NAME} | ngram+lyanna |" in out
    assert "| counter | ngram+lyanna | " in out
    assert "broken" not in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--peers", "counter", "absent"), r"^absent is not installed; run `pip install absent`$"),
        (("--system", "a"), "--system needs --chat"),
        (("--checkpoint", "gone"), "no checkpoint folder gone; check --checkpoint"),
        (("--engines", "same", "same"), "both are fp32; give one bundle a precision"),
    ],
)
def test_bad_usage(measure: Measure, lyanna_bundle: Path, options: tuple[str, ...], message: str) -> None:
    given = [str(lyanna_bundle) if option == "same" else option for option in options]
    with pytest.raises(UsageError, match=message):
        measure(*given)
