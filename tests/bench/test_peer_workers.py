"""Worker processes of peers, and the models that peers convert."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from functools import partial
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest
from tests.standins import peers

from redraft.bench.peers import worker as workers
from redraft.bench.peers.base import NGRAM, PLAIN, RECORD, PeerError, PeerModel, PeerSource, converted, run_tool
from redraft.bench.peers.llamacpp import gguf_file
from redraft.bench.peers.openvino import convert as convert_openvino
from redraft.bench.peers.worker import Turn, Worker, answer_requests

MODEL = PeerModel(Path("none"), "fp32", threads=2, context=9)


def start(decoder: type[peers.Counter]) -> closing[Worker]:
    """Start a worker that is closed at the end."""
    return closing(Worker(partial(decoder, MODEL)))


def test_a_worker_decodes_and_its_prints_are_not_figures(capfd: pytest.CaptureFixture[str]) -> None:
    """A text of another length is an error."""
    with start(peers.Counter) as worker:
        assert (worker.modes, worker.settings) == ((PLAIN, NGRAM), {"threads": 2, "context": 9})
        assert worker.decode(PLAIN, [4, 5], 3).decoded.token_ids == (6, 7, 8)
        with pytest.raises(PeerError, match="expected 21 new tokens, found 20"):
            worker.decode(PLAIN, [1], 21)
    out, err = capfd.readouterr()
    assert out == ""
    assert "decoding" in err


class BusyPipe:
    """A pipe whose process computes for `BUSY` seconds before each request but the first."""

    BUSY = 0.2

    def __init__(self, requests: int) -> None:
        self.requests, self.turns = requests, []

    def recv(self) -> tuple[str, list[int], int]:
        if len(self.turns) == self.requests:
            raise EOFError
        until = time.process_time() + (self.BUSY if self.turns else 0)
        while time.process_time() < until:
            pass
        return PLAIN, [1], 3

    def send(self, turn: Turn) -> None:
        self.turns.append(turn)


def test_processor_time_between_turns_shows() -> None:
    pipe = BusyPipe(3)
    with pytest.raises(EOFError):
        answer_requests(pipe, peers.Counter(MODEL))
    first, *later = (turn.idle_cpu_seconds for turn in pipe.turns)
    assert first < BusyPipe.BUSY <= min(later)
    assert max(turn.cpu_seconds for turn in pipe.turns) < BusyPipe.BUSY


def test_a_decoder_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(PeerError, match=r"^RuntimeError: no such model$"):
        Worker(partial(peers.refused, MODEL))


def test_a_process_that_ends_is_an_error_now_and_later() -> None:
    with start(peers.Crashing) as worker:
        for _ in range(2):
            with pytest.raises(PeerError, match="its process ended with status 3"):
                worker.decode(PLAIN, [1], 3)


def test_a_worker_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with start(peers.Slow) as worker:
        monkeypatch.setattr(workers, "LONGEST_SECONDS", 0.1)
        for reason in ("no answer in 0 seconds", "its process ended with status -15"):
            with pytest.raises(PeerError, match=reason):
                worker.decode(PLAIN, [1], 3)


def test_an_interrupt_ends_the_program_that_a_worker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is interrupted while its worker waits for an exporter."""

    def interrupted(worker: Worker) -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(partial(peers.Exporting, PeerModel(tmp_path, "fp32", threads=2, context=9)))
    program = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while runs(program) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(program)


def runs(program: int) -> bool:
    """Return true if a process exists and has not ended: one that ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{program}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_without_a_parent_ends_quietly() -> None:
    """Its answer may come after the parent has gone."""
    ours, theirs = Pipe()
    ours.close()
    process = get_context("spawn").Process(target=workers.serve, args=(theirs, partial(peers.Counter, MODEL)))
    process.start()
    theirs.close()
    process.join(60)
    assert process.exitcode == 0


def test_a_model_is_converted_again_only_for_other_files(tmp_path: Path) -> None:
    source = PeerSource(tmp_path / "checkpoint", Path("none"))
    source.checkpoint.mkdir()
    (source.checkpoint / "model.safetensors").write_text("a")
    convert = partial(converted, peers.COUNTER, source, "fp32", tmp_path / "keep")
    assert (convert() / "model").read_text() == "fp32"
    convert()
    assert (source.checkpoint / "conversions").read_text() == "x"
    (source.checkpoint / "model.safetensors").write_text("ab")
    convert()
    assert (source.checkpoint / "conversions").read_text() == "xx"


def test_a_failed_conversion_keeps_no_model(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no fp32 for you"):
        converted(peers.BROKEN, PeerSource(tmp_path, Path("none")), "fp32", tmp_path / "keep")
    assert not list((tmp_path / "keep").rglob(RECORD))
    assert not (tmp_path / "keep" / "broken" / "fp32").exists()


def test_a_checkpoint_needs_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"expected one GGUF file in .*, found none"):
        gguf_file(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert gguf_file(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(PeerError, match=r"found a.gguf, b.gguf; leave one there"):
        gguf_file(tmp_path)


def test_openvino_needs_its_exporter(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"no exporter .*optimum-intel"):
        convert_openvino(PeerSource(tmp_path, tmp_path / "optimum-cli"), "int4", tmp_path)


def test_a_converter_that_fails_is_one_line() -> None:
    programs = {
        "import sys; print('no'); sys.exit('first\\n last')": "failed: last",
        "print('only line'); exit(1)": "failed: only line",
        "exit(4)": "failed: exit status 4",
    }
    for program, reason in programs.items():
        with pytest.raises(PeerError) as caught:
            run_tool([sys.executable, "-c", program])
        assert str(caught.value).endswith(reason)
        assert "\n" not in str(caught.value)
