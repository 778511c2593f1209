"""The kernels of a machine are checked once, and the verifier uses the saved result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from redraft import names
from redraft.engines.device import Buffer, Run
from redraft.engines.host_device import array_of
from redraft.runtime.steps.exactness import Exactness, measure_exactness, settle_exactness
from redraft.runtime.steps.verifier import Verifier
from tests.runtime.fakes import FakeEngine, engine_of, fake_verifier


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "redraft" / "curves"


class Rounding(FakeEngine):
    """A model without attention whose logits are off by a bit in selected calls, by sequences and rows in all."""

    def __init__(self, where: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.where = where
        self.calls = 0

    def bind(self, buffers: Mapping[str, Buffer]) -> Run:
        ids, positions, wanted, logits = (
            array_of(buffers[name]) for name in (names.TOKEN_IDS, names.POSITIONS, names.OUTPUT_ROWS, names.LOGITS)
        )
        sequences, rows = buffers[names.CACHE_LEN].shape[0], ids.shape[1]

        def rounded() -> None:
            self.calls += 1
            last = np.take_along_axis(ids + 1000 * positions, wanted, axis=1)
            logits[:] = np.sin(last[..., None] * np.arange(1.0, logits.shape[-1] + 1))
            if self.where(sequences, rows):
                logits[:] += np.float32(1e-6)

        return rounded


def verifier(where: Callable[[int, int], bool], max_num_seqs: int = 3) -> Verifier:
    return fake_verifier(Rounding(where), 200, max_num_seqs)


def test_kernels_that_never_differ_are_exact() -> None:
    found = measure_exactness(verifier(lambda sequences, rows: False))
    assert found.holds
    assert found.compared > 10_000


@pytest.mark.parametrize(
    ("where", "named"),
    [
        (lambda sequences, rows: sequences == rows == 1, {"one row in a call"}),
        (lambda sequences, rows: (sequences, rows) == (2, 1 + 9), {"a tree's branch in a batch"}),
        (lambda sequences, rows: sequences == 1 and rows == 9, {"a tree's branch"}),
        (lambda sequences, rows: rows == 8, {"a few rows in a call"}),
        (lambda sequences, rows: (sequences, rows) == (3, 2 + 7 + 1), {"one token in a batch"}),
        (lambda sequences, rows: (sequences, rows) == (3, 6 + 2 + 5), {"several tokens in a batch"}),
    ],
)
def test_differences_are_named(where: Callable[[int, int], bool], named: set[str]) -> None:
    found = measure_exactness(verifier(where))
    assert set(found.differences) == named
    assert max(found.differences.values()) == pytest.approx(1e-6, rel=0.2)


def test_a_single_row_that_differs_is_computed_as_two_also_after_the_next_opening() -> None:
    first = verifier(lambda sequences, rows: sequences == rows == 1)
    assert settle_exactness(first, {"build": "a"}).holds
    assert first.steps.fewest_rows == 2
    again = verifier(lambda sequences, rows: sequences == rows == 1)
    assert settle_exactness(again, {"build": "a"}).holds
    assert again.steps.fewest_rows == 2
    assert engine_of(again).calls == 0  # type: ignore[attr-defined]


def test_differences_that_two_rows_do_not_remove_are_named() -> None:
    other = verifier(lambda sequences, rows: rows < 3)
    found = settle_exactness(other, {"build": "a"})
    assert "one row in a call" in found.differences


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(2, 1), (12, 2), (33, 2)])
def test_a_short_context_is_not_compared(max_model_len: int, max_num_seqs: int) -> None:
    found = measure_exactness(fake_verifier(FakeEngine(), max_model_len, max_num_seqs))
    assert found == Exactness(0, {})


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"fewest_rows": 7, "compared": 1, "differences": {}}', b'{"x": 1}'])
def test_a_damaged_file_is_measured_again(cache: Path, damage: bytes) -> None:
    settle_exactness(verifier(lambda sequences, rows: False), {"build": "a"})
    (file,) = cache.iterdir()
    file.write_bytes(damage)
    assert isinstance(settle_exactness(verifier(lambda sequences, rows: False), {"build": "a"}), Exactness)
    assert json.loads(file.read_bytes())["fewest_rows"] == 1
