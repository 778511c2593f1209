"""EAGLE-2: EAGLE's drafter, with trees by its own probabilities.

Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", section 4.
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method

METHOD = feature_tree_method("eagle2", "EAGLE-2: EAGLE's drafter, with trees by its own probabilities.")
