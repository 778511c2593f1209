"""Training of the method's drafter: a preset of `feature_method`."""

from __future__ import annotations

from redraft.export.drafters.fspad_graphs import FORM
from redraft.methods.fspad import METHOD as SPECIFICATION
from redraft.train.objectives.feature_method import method_of

METHOD = method_of(SPECIFICATION, FORM, noise=0.1)
