"""GRIFFIN: token-guided fusion, a token-enhanced head, and training on aligned tokens alone.

Hu et al. 2025, "GRIFFIN: Effective Token Alignment for Faster Speculative Decoding", section 4.
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method

METHOD = feature_tree_method("griffin", "GRIFFIN: tokens guide the fusion, and training counts aligned tokens alone.")
