"""The random numbers of sampling: their definition, which NumPy (the verifier's sampler) and graphs (drafters) repeat.

Gumbel noise is a function of (request seed, absolute position of the token, token id, stream) alone. The first three
words make a row's key here, in Python. The token id enters in the repeated part, which has only additions and products
of non-negative numbers below 2^63, and divisions by powers of two:

    x = id + k[0]
    for r in range(ROUNDS):                 k[r] alternates: k1, k0, k1 …
        if r > 0:  x = x + x div 2^SHIFT
        x = x * (2 * x + k[r]) mod 2^WORD_BITS
    u = (x div 2^(WORD_BITS - UNIFORM_BITS) + 0.5) * 2^-UNIFORM_BITS        in float32, exact, strictly in (0, 1)
    noise = -log(-log(u))                                                   in float32

x * (2 * x + k) with an odd k is a permutation of the words (Rivest, "Permutation polynomials modulo 2^w", 2001; RC6
uses it). The square is what mixes: a linear round, x * c + k, leaves neighbouring ids correlated whatever the number of
rounds, since x + x div 2^s is almost linear too. With 24 random bits instead of 23, (2^24 - 0.5) * 2^-24 would round to
1, and the noise would be infinite once in 2^24 tokens.

The word x and u are the same bits everywhere. The logarithms of two libraries may differ in the last bit. Only the
verifier's noise decides which tokens come out, so such a difference costs a drafter an accepted token at worst.
"""

from __future__ import annotations

WORD_BITS = 30
"""Bits of x. With them 3 * 2^60 bounds every product, so int64 holds it."""
SHIFT = 15
ROUNDS = 3
UNIFORM_BITS = 23
"""Random bits of u. Its float32 has 24, of which the last is the half."""

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
