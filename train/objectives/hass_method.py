"""Training of the method's drafter: a preset of `feature_method`."""

from __future__ import annotations

from redraft.export.drafters.hass_graphs import FORM
from redraft.methods.hass import METHOD as SPECIFICATION
from redraft.train.objectives.feature_method import method_of

METHOD = method_of(SPECIFICATION, FORM, passes=3, top=10, top_weight=1.0)
