"""FSPAD: EAGLE-2 with feature sampling by the token, and separate outputs for token and feature.

Gui et al. 2024, "Boosting Lossless Speculative Decoding via Feature Sampling and Partial Alignment Distillation"
(arXiv 2408.15562).
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method

METHOD = feature_tree_method("fspad", "FSPAD: the token samples the feature; token and feature have their own outputs.")
