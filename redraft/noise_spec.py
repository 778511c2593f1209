"""The random numbers of sampling: their definition, which NumPy (the verifier's sampler) and graphs (drafters) repeat.

Gumbel noise is a function of (request seed, absolute position of the token, token id, stream) alone. The first three
words make a row's key here, in Python. The token id enters in the repeated part, which has only additions and products
of non-negative numbers below 2^63, and divisions by powers of two:

    x = id + k[0]
    for r in range(ROUNDS):                 k[r] alternates: k1, k0, k1 …
        if r > 0:  x = x + x div 2^SHIFT
        x = x * (2 * x + k[r]) mod 2^WORD_BITS
    v = float32(x) * UNIFORM_SCALE + UNIFORM_OFFSET                       in (0, 1), as fine as 2^-30 near 0
    e = v * (1 + v * (1/2 + v * 1/3)) if x < SERIES_BELOW, else -log(1 - v)       1 - v has no digits of a small v
    noise = -log(e)                                                       falls as x grows; all in float32

x * (2 * x + k) with an odd k is a permutation of the words (Rivest, "Permutation polynomials modulo 2^w", 2001; RC6
uses it). The square mixes. Linear rounds, x * c + k, leave neighbouring ids correlated, however many they are, since
x + x div 2^s is almost linear too. A small v is a large noise: if its digits were lost, a token of a probability below
2^-24 could never win.

The word x and v are the same bits everywhere. The logarithms of two libraries may differ in the last bit. Only the
verifier's noise decides which tokens come out, so such a difference costs a drafter an accepted token at worst.
"""

from __future__ import annotations

WORD_BITS = 30
"""Bits of x. With them 3 * 2^60 bounds every product, so int64 holds it."""
SHIFT = 15
ROUNDS = 3
UNIFORM_SCALE = 2.0**-WORD_BITS * (1 - 2.0**-24)
"""The factor keeps v below 1: float32 rounds the largest words up to 2^WORD_BITS."""
UNIFORM_OFFSET = 2.0 ** -(WORD_BITS + 1)
SERIES_BELOW = 1 << WORD_BITS - 7

COUPLED, INDEPENDENT, ACCEPTANCE = 0, 1, 2
"""Streams: noise of the verifier and of drafters that follow it, of drafters that draw on their own, of acceptance."""

_WORD = (1 << WORD_BITS) - 1
_MASK = (1 << 64) - 1


def row_key(seed: int, position: int, stream: int = COUPLED) -> tuple[int, int]:
    """Return the key (k0, k1) of one position's noise: odd numbers below 2^WORD_BITS.

    seed: any integer, of which the low 64 bits count.   position: absolute index of the token in its sequence.
    """
    z = _mixed((_mixed(seed + _STEP) + position * _STEP + stream * _OTHER_STEP) & _MASK)
    return z & _WORD | 1, z >> 32 & _WORD | 1


def round_keys(key: tuple[int, int]) -> tuple[int, ...]:
    """Return the number that each round adds: k1, k0, k1 …"""
    return tuple(key[(number + 1) % 2] for number in range(ROUNDS))


_STEP, _OTHER_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def _mixed(z: int) -> int:
    """Return the output function of splitmix64 (Steele, Lea, Flood 2014) for the low 64 bits of z."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
