"""Gumbel noise as a function of request seed, position and token id alone.

The index of the largest logit + noise is a draw from softmax(logits) (Gumbel-max trick). As the noise depends on
nothing else, every implementation can compute it for any subset of the vocabulary. A row has a key of 64 bits, and each
token a 32-bit hash x of its id and the key. All steps of the hash are modulo 2^32:

    x = id * FIRST + k0;   x = x (2 x + 1);   x = x + x div 2^16;   x = x * SECOND + k1;   x = x (2 x + 1)

A graph can repeat it in int64 without overflow, bit operations or shifts, since the constants are below 2^31 and
x^2 = (x mod 2^16)^2 + 2^17 (x mod 2^16) (x div 2^16). x (2 x + 1) is RC6's permutation (Rivest et al. 1998, section 3).
Sums and quotients alone would be almost linear in the id.

v = float32(x) * UNIFORM_SCALE + UNIFORM_OFFSET is in (0, 1), and as fine as 2^-32 where it is small. The constants are
`redraft.noise_spec`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, expm1
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from redraft.noise_spec import (
    ACCEPTANCE,
    COUPLED,
    DRAWN,
    FIRST,
    SECOND,
    SERIES_BELOW,
    SHIFT,
    UNIFORM_OFFSET,
    UNIFORM_SCALE,
)
from redraft.runtime.params import COUPLED as ACCEPTS_COUPLED
from redraft.runtime.params import LEAST_TEMPERATURE, SamplingParams
from redraft.types import FloatArray

HashArray = NDArray[np.uint32]

_BLOCK = 16384
"""Tokens computed at a time, so that temporary arrays stay in the processor's cache."""
_MASK = (1 << 64) - 1


class RowKey(NamedTuple):
    """The key of the noise of one row: two numbers below 2^32."""

    k0: int
    k1: int


def row_key(seed: int, position: int, stream: int = COUPLED) -> RowKey:
    """Return the key of the noise at a token's absolute position, in a request with this seed (0 to 2^63 - 1)."""
    mixed = _mixed(seed, position, stream)
    return RowKey(mixed & 0xFFFFFFFF, mixed >> 32)


def uniform(seed: int, position: int, stream: int = ACCEPTANCE) -> float:
    """Return a number in [0, 1) from the arguments alone."""
    return (_mixed(seed, position, stream) >> 11) / (1 << 53)


def _mixed(*values: int) -> int:
    """Return 64 bits that depend on all values: splitmix64 (Steele et al. 2014, figure 17) over one after the other."""
    z = 0
    for value in values:
        z = ((z ^ value) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


@lru_cache(maxsize=8)
def all_ids(vocabulary: int) -> HashArray:
    """Return the ids 0 to vocabulary - 1. Calls share the result, so it is read only."""
    ids = np.arange(vocabulary, dtype=np.uint32)
    ids.setflags(write=False)
    return ids


def hashes(key: RowKey, ids: HashArray) -> HashArray:
    """Return the hash of each id, uint32[n]."""
    found = np.empty(len(ids), np.uint32)
    first, second, half, k0, k1 = map(np.uint32, (FIRST, SECOND, SHIFT, *key))
    for block in _blocks(len(ids)):
        x = found[block]
        np.multiply(ids[block], first, out=x)
        x += k0
        other = x * x
        other += other
        x += other
        np.right_shift(x, half, out=other)
        x += other
        x *= second
        x += k1
        np.multiply(x, x, out=other)
        other += other
        x += other
    return found


def gumbel(found: HashArray) -> FloatArray:
    """Return the noise -log(-log(1 - v)) of each hash, float32[n]. It falls as the hash grows."""
    noise = np.empty(len(found), np.float32)
    one = np.float32(1)
    for block in _blocks(len(found)):
        x, e = found[block], noise[block]
        e[:] = x
        e *= np.float32(UNIFORM_SCALE)
        e += np.float32(UNIFORM_OFFSET)
        small = np.flatnonzero(x < np.uint32(SERIES_BELOW))
        v = e[small]
        np.subtract(one, e, out=e)
        np.log(e, out=e)
        np.negative(e, out=e)
        e[small] = v * (one + v * (np.float32(1 / 2) + v * (np.float32(1 / 3) + v * np.float32(1 / 4))))
        np.log(e, out=e)
        np.negative(e, out=e)
    return noise


def noise_of(key: RowKey, ids: HashArray) -> FloatArray:
    """Return the noise of these ids in the row of `key`, float32[n]."""
    return gumbel(hashes(key, ids))


def largest_hash(noise: float) -> int:
    """Return a bound: every hash whose noise is at least `noise` is at most this."""
    lower = noise - 1e-3  # float32 rounds noise by less
    if lower < -3:
        return 0xFFFFFFFF
    return min(ceil(-expm1(-exp(-lower)) * 2**32) + 1, 0xFFFFFFFF)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


NoiseKind = Literal["none", "coupled", "drawn"]


@dataclass(frozen=True, slots=True)
class DraftNoise:
    """The way in which candidates follow a request's sampling.

    temperature: the request's temperature. At 0 candidates have no noise, and the other fields do not count.
    seed:        the request's seed.
    stream:      COUPLED for the verifier's own noise: candidates are the tokens that the verifier would sample if the
                 drafter's logits were right. DRAWN to draw from the drafter's distribution, for rejection
                 sampling.
    """

    temperature: float = 0.0
    seed: int = 0
    stream: int = COUPLED

    @property
    def drawn(self) -> bool:
        """True if candidates are drawn from the drafter's distribution, softmax(logits / temperature)."""
        return self.stream == DRAWN and self.temperature > 0

    @property
    def kind(self) -> NoiseKind:
        """The kind of noise. Acceptance rates differ between kinds, so the controller learns them by kind."""
        return "drawn" if self.drawn else "coupled" if self.temperature > 0 else "none"

    def logit_scale(self, draft_logit_scale: float) -> float:
        """Return the factor on logits and noise, for a drafter whose own factor for likeliest tokens is given.

        Given the noise, the verifier's token is certain, as in greedy decoding. So the same factor fits.
        """
        return 1 / max(self.temperature, LEAST_TEMPERATURE) if self.drawn else draft_logit_scale

    def keys(self, position: int, count: int) -> list[tuple[int, int]]:
        """Return the keys of `count` positions from an absolute one on.

        Each step of a request draws with new keys, even for positions that earlier drafts had: block verification may
        have decided by those draws. Positions are below 2^32, and so are steps.
        """
        spacing = 1 << 32 if self.drawn else 1
        return [row_key(self.seed, position + step * spacing, self.stream) for step in range(count)]


NO_NOISE = DraftNoise()


def draft_noise(params: SamplingParams) -> DraftNoise:
    """Return the noise of a request's drafts: its verifier's, or independent numbers if it accepts by rejection."""
    return DraftNoise(params.temperature, params.seed, COUPLED if params.acceptance == ACCEPTS_COUPLED else DRAWN)
