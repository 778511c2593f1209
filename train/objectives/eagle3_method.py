"""Training of the method's drafter: a preset of `feature_method`."""

from __future__ import annotations

from redraft.export.drafters.eagle3_graphs import FORM
from redraft.methods.eagle3 import METHOD as SPECIFICATION
from redraft.train.objectives.feature_method import method_of


def low_middle_high(layers: int) -> tuple[str, ...]:
    """Return the inputs of layers 2, L / 2 and L - 3, as EAGLE-3's drafters were published; of few layers, the first.

    Name `3` is the output of the layer with index 3.
    """
    found = (1, layers // 2 - 1, layers - 4)
    distinct = found[0] < found[1] < found[2] < layers
    return tuple(map(str, found if distinct else range(min(layers, len(found)))))


METHOD = method_of(
    SPECIFICATION, FORM, low_middle_high, passes=5, step_weight=0.8, feature_loss="none", features=0.0, soft=1.0
)
