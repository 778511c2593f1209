"""The parts of texts whose hidden states a build computes."""

from __future__ import annotations

import pytest

from redraft.assembly import verifier
from redraft.assembly.verifier import windows


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ((50, 60), 99, [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8)]),
        ((50, 5), 99, [(0, 0), (0, 4), (0, 8), (1, 0)]),
        ((50, 3), 99, [(0, 0), (0, 3), (0, 6), (0, 9), (1, 0)]),
        ((50,), 2, [(0, start) for start in range(0, 24, 2)]),
    ],
    ids=["as many of each text", "a short text has fewer", "no longer than a text", "no longer than the context"],
)
def test_windows(
    lengths: tuple[int, ...], longest: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "STATE_TOKENS", 24)
    monkeypatch.setattr(verifier, "STATE_WINDOW", 4)
    texts = [[100 * text + token for token in range(length)] for text, length in enumerate(lengths)]
    found = windows(texts, longest)
    assert [divmod(part[0], 100) for part in found] == expected
    assert {len(part) for part in found} == {min(4, longest, *lengths)}
    assert all(part[-1] == part[0] + len(part) - 1 for part in found)
