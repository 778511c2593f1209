"""Training of the method's drafter: a preset of `feature_method`."""

from __future__ import annotations

from redraft.export.drafters.griffin_graphs import FORM
from redraft.methods.griffin import METHOD as SPECIFICATION
from redraft.train.objectives.feature_method import method_of

METHOD = method_of(SPECIFICATION, FORM, passes=3, feature_loss="l1", aligned=3)
