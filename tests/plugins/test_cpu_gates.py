"""Gates on CPUs equal their definition to the bit, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from .attention import Attention, literal_gate
from .products import check_equal


@pytest.mark.parametrize("n", [1, 3, 16, 37, 1536])
def test_gates(used_attention: Attention, n: int) -> None:
    """Numbers of every size, infinities and NaNs, which reach no other number."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((5, 2 * n)) * 10.0 ** rng.integers(-30, 3, (5, 2 * n))).astype(np.float32)
    x[3] = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 88.0, -104.0, 1e-40], np.float32), 2 * n)
    factors = rng.uniform(0.5, 2, n).astype(np.float32)
    check_equal(used_attention.gate(x), literal_gate(x))
    check_equal(used_attention.gate(x, factors), literal_gate(x, factors))
    x = np.clip(x[:3], -80, 80)
    g, u = np.split(x.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(used_attention.gate(x), g / (1 + np.exp(-g)) * u, rtol=1e-6, atol=1e-37)
