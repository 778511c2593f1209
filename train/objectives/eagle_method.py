"""Training of the method's drafter: a preset of `feature_method`."""

from __future__ import annotations

from redraft.export.drafters.eagle_graphs import FORM
from redraft.methods.eagle import METHOD as SPECIFICATION
from redraft.train.objectives.feature_method import method_of

METHOD = method_of(SPECIFICATION, FORM, noise=0.1)
