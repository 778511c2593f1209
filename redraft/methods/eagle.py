"""EAGLE: a layer predicts the next feature from features and the token one step ahead; trees of one form.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", section 4.
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method

METHOD = feature_tree_method("eagle", "EAGLE: a layer over features and the next token drafts trees of one form.")
