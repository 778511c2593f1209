"""HASS: EAGLE-2 with a drafter that was trained on its own features.

Zhang et al. 2024, "Learning Harmonized Representations for Speculative Sampling" (arXiv 2408.15766).
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method

METHOD = feature_tree_method("hass", "HASS: EAGLE-2 with a drafter that was trained on its own features.")
