"""The host's part of drafts under noise: positions, streams, and factors that are written when they change."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from redraft import names
from redraft.engines.device import Buffer
from redraft.engines.host_device import HostBuffer, array_of
from redraft.noise_spec import COUPLED, DRAWN
from redraft.runtime.drafters.candidate_noise import SlotNoise
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling.noise import NO_NOISE, DraftNoise, row_key
from redraft.runtime.sampling.sampler import Greedy

STEPS, SCALE = 3, 1.5


class Host:
    """A device that has buffers alone."""

    def empty(self, dtype: str, *shape: int) -> HostBuffer:
        """Return a buffer of zeros."""
        return HostBuffer.zeros(dtype, *shape)  # type: ignore[arg-type]


def request(length: int, noise: DraftNoise) -> Request:
    return Request([1] * length, length, 99, frozenset(), Greedy(), noise=noise)


def integers(slots: int) -> dict[str, np.ndarray]:
    return {names.NOISE_KEYS: np.zeros((slots, STEPS, 2), np.int64), names.DRAWN: np.ones(slots, np.int64)}


def floats(buffers: Mapping[str, Buffer]) -> list[list[float]]:
    return [array_of(buffers[name]).tolist() for name in (names.DRAFT_LOGIT_SCALE, names.NOISE_SCALE)]


def test_each_slot_has_its_sequences_factors_keys_and_positions() -> None:
    """The first key is that of the token after the last one, whose absolute index is the number of tokens."""
    noise = SlotNoise(Host(), 4, SCALE)  # type: ignore[arg-type]
    values = integers(3)
    drawn = DraftNoise(0.5, 8, DRAWN)
    noise.set([request(10, DraftNoise(2.0, 7)), request(4, NO_NOISE), request(6, drawn)], values)
    assert floats(noise.buffers(range(4))) == [[SCALE, SCALE, 2.0, SCALE], [2.0, 0.0, 0.5, 0.0]]
    assert values[names.DRAWN].tolist() == [0, 0, 1]
    assert values[names.NOISE_KEYS][0].tolist() == [list(row_key(7, 10 + step, COUPLED)) for step in range(STEPS)]
    assert values[names.NOISE_KEYS][2].tolist() == [list(key) for key in drawn.keys(6, STEPS)]
    noise.set([request(9, NO_NOISE), request(3, DraftNoise(3.0, 7))], integers(2), first_slot=2)
    assert floats(noise.buffers(range(4))) == [[SCALE] * 4, [2.0, 0.0, 0.0, 3.0]]
    assert floats(noise.buffers(range(2, 4))) == [[SCALE] * 2, [0.0, 3.0]]


def test_factors_are_written_only_when_they_change() -> None:
    noise = SlotNoise(Host(), 2, SCALE)  # type: ignore[arg-type]
    scales = array_of(noise.buffers(range(2))[names.NOISE_SCALE])
    for request_noise in (NO_NOISE, DraftNoise(1.0, 3)):
        noise.set([request(5, request_noise)], integers(1))
        scales[:] = 9
        noise.set([request(6, request_noise)], integers(1))
        assert scales.tolist() == [9, 9]
    noise.clear()
    assert floats(noise.buffers(range(2))) == [[SCALE] * 2, [0.0] * 2]


def test_a_change_of_any_slot_is_written() -> None:
    """Requests move to other slots. A call over the first slots keeps the noise of later ones."""
    noise = SlotNoise(Host(), 3, SCALE)  # type: ignore[arg-type]
    first, second, third = DraftNoise(1.0, 3), DraftNoise(0.5, 4, DRAWN), DraftNoise(2.0, 5)
    kept = [NO_NOISE] * 3
    for batch in ((first, second, third), (first, third), (first, NO_NOISE, second), (first,)):
        noise.set([request(5, one) for one in batch], integers(len(batch)))
        kept[: len(batch)] = batch
        scales = [2.0 if one is second else SCALE for one in kept]
        assert floats(noise.buffers(range(3))) == [scales, [one.temperature for one in kept]]
    assert floats(noise.without) == [[SCALE], [0.0]], "of calls whose tree nobody reads"


def test_greedy_requests_draw_nothing() -> None:
    assert not DraftNoise(0.0, 3, DRAWN).drawn
    assert not DraftNoise(1.0, 3, COUPLED).drawn


def test_keys_are_those_of_the_stream() -> None:
    """Numbers that draw candidates are not the verifier's, nor those that accept."""
    assert DraftNoise(1.0, 3).keys(6, 2) == [row_key(3, 6, COUPLED), row_key(3, 7, COUPLED)]
    assert DraftNoise(1.0, 3, DRAWN).keys(6, 2) == [row_key(3, 6, DRAWN), row_key(3, 6 + (1 << 32), DRAWN)]


def test_drafts_of_two_steps_share_no_drawn_number() -> None:
    """Coupled drafts share those of the positions that both have."""
    for stream, shared in ((COUPLED, STEPS - 1), (DRAWN, 0)):
        noise = DraftNoise(1.0, 3, stream)
        assert len({*noise.keys(6, STEPS)} & {*noise.keys(7, STEPS)}) == shared
