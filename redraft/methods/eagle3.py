"""EAGLE-3: low, middle and high hidden states fused, and tokens predicted without a loss of features.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", section 3.
"""

from __future__ import annotations

from redraft.methods.feature_tree import feature_tree_method
from redraft.names import LAST_HIDDEN_STATE

METHOD = feature_tree_method(
    "eagle3", "EAGLE-3: low, middle and high hidden states drafted from together.", ("0", "1", LAST_HIDDEN_STATE)
)
