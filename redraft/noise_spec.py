"""Constants of the noise of sampling, which is computed in NumPy and in graphs.

`redraft.runtime.sampling.noise` describes the hash and the noise, and `redraft.export.graph.noise` is its graph form.
The hashes of a row are the same bits in both. Two libraries may round v and the logarithms differently. The verifier's
noise decides which tokens come out: NumPy's on the host, and on a device the graph's if a request has a temperature
alone. In a drafter's noise, such a difference costs an accepted token at worst.
"""

from __future__ import annotations

WORD_BITS = 32
"""Bits of a hash."""
FIRST, SECOND = 0x3C6EF35F, 0x7FEB352D
"""Odd factors below 2^31."""
SHIFT = 16
UNIFORM_SCALE = 2.0**-WORD_BITS * (1 - 2.0**-24)
"""The factor keeps v below 1: float32 rounds the largest hashes up to 2^32."""
UNIFORM_OFFSET = 2.0 ** -(WORD_BITS + 1)
SERIES_BELOW = 1 << 26
"""-log(1 - v) of a hash below this is v (1 + v/2 + v^2/3 + v^3/4), since 1 - v would round away a small v's digits."""

COUPLED, DRAWN, ACCEPTANCE = 0, 1, 2
"""Streams: of the verifier and coupled drafters, of drafters that draw on their own, of acceptance tests."""
