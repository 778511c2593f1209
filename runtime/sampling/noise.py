"""Random numbers that depend on the request's seed and the token's position alone."""

from __future__ import annotations


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return a number in [0, 1) from the arguments alone: splitmix64's finaliser over their combination."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + stream * 0x8CB92BA72F3D8DD7) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


_MASK = (1 << 64) - 1
