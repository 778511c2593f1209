"""Measures the effect of rounding on each product, on the rows that a text gives it: one pass of the model in fp32.

A product's error is the mean square of what rounding its weight and its input changes, over the mean square of its
result. Smoothing moves a part of the inputs' spread into the weight (SmoothQuant, arXiv 2211.10438, section 4.1):

    s_j = max |x_j|^strength / max |w_j|^(1 - strength),  y = (x / s) (s w)^T

The strength with the least error is taken, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from redraft.export.checkpoint.sources import AnySource
from redraft.export.quantization import rounding
from redraft.export.quantization.product_forms import ProductPlan
from redraft.export.quantization.product_weights import ProductWeight
from redraft.export.quantization.rounding import BLOCK
from redraft.export.streaming import parameter_names

STRENGTHS = (0.35, 0.5, 0.65)
LEAST_GAIN = 0.75
"""Smoothing must reduce a product's error to this share, since it costs an operator."""
SAMPLED_INPUTS, SAMPLED_OUTPUTS = 96, 192
"""Rows of a product's input, and outputs of each of its weights, that are compared."""


@dataclass
class Calibration:
    """The measurements. Products that the pass did not reach are in none of the mappings.

    errors:    by parameter, the relative error by bits.
    smoothing: by first parameter of a product, the factors of its inputs.
    """

    errors: dict[str, dict[int, float]] = field(default_factory=dict)
    smoothing: dict[str, NDArray[np.float32]] = field(default_factory=dict)


class Calibrator:
    """Watches a streamed model, and measures the products of each unit while its weights are there."""

    def __init__(
        self, products: Sequence[ProductWeight], source: AnySource, plans: Sequence[ProductPlan], rows: slice
    ) -> None:
        """plans: one of each precision.   rows: the texts of a batch that are for calibration."""
        self.found = {plan.precision: Calibration() for plan in plans}
        self._source, self._plans, self._rows = source, plans, rows
        self._products = {weight.parameters[0]: weight for weight in products}
        self._inputs = dict[str, torch.Tensor]()

    def watch(self, model: nn.Module) -> None:
        """Keep the inputs of modules that multiply by the first parameter of a product."""
        names = parameter_names(model)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if first := next((name for name in names[id(parameter)] if name in self._products), None):
                    module.register_forward_pre_hook(self._keeper(first))

    def _keeper(self, parameter: str) -> Callable[[nn.Module, Any], None]:
        def keep(module: nn.Module, args: Any) -> None:
            x = args[0]
            if not isinstance(x, torch.Tensor) or x.dim() != 3:
                return
            rows = x[self._rows].reshape(-1, x.shape[-1])
            step = max(1, len(rows) // SAMPLED_INPUTS)
            self._inputs[parameter] = rows[::step].float().clone()

        return keep

    def ran(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Measure the products whose weights are among these parameters of a unit that has just run."""
        for first in [name for name in self._inputs if name in parameters]:
            weight, x = self._products[first], self._inputs.pop(first)
            if all(name in parameters for name in weight.parameters):
                matrices = [parameters[name] for name in weight.parameters]
                for plan in self._plans:
                    self._measure(plan, weight, matrices, x)

    def _measure(
        self, plan: ProductPlan, weight: ProductWeight, matrices: Sequence[torch.Tensor], x: torch.Tensor
    ) -> None:
        calibration = self.found[plan.precision]
        whole = [matrix.T if weight.turned else matrix for matrix in matrices]
        sampled = [matrix[:: max(1, len(matrix) // SAMPLED_OUTPUTS)] for matrix in whole]
        unrounded = all(plan.form(part, self._source, False, False).stored for part in weight.parts())
        base = 8 if plan.precision == "int8" else 4
        factors = None if unrounded else self._best_factors(whole, sampled, x, base)
        if factors is not None:
            calibration.smoothing[weight.parameters[0]] = factors.numpy()
        for part, rows in zip(weight.parts(), sampled, strict=True):
            form = plan.form(part, self._source, factors is not None, False)
            calibration.errors[part.parameters[0]] = {
                bits: self._error(rows, x, factors, bits, form.stored and form.bits <= bits) for bits in {base, 8}
            }

    def _best_factors(
        self, whole: Sequence[torch.Tensor], sampled: Sequence[torch.Tensor], x: torch.Tensor, bits: int
    ) -> torch.Tensor | None:
        """Return the factors with the least error, or None if no smoothing is better enough than none."""
        of_input = x.abs().amax(0).clamp(min=1e-5)
        ends = [end for matrix in whole for end in (matrix.amax(0), -matrix.amin(0))]  # abs() would copy the matrix
        of_weight = torch.stack(ends).amax(0).clamp(min=1e-5)
        rows = torch.cat(list(sampled))
        best, least = None, LEAST_GAIN * self._error(rows, x, None, bits, False)
        for strength in STRENGTHS:
            factors = of_input**strength / of_weight ** (1 - strength)
            factors = factors / factors.log().mean().exp()
            error = self._error(rows, x, factors, bits, False)
            if error < least:
                best, least = factors, error
        return best

    def _error(
        self, rows: torch.Tensor, x: torch.Tensor, factors: torch.Tensor | None, bits: int, exact: bool
    ) -> float:
        """Return the relative error of a product. exact: True if the weight is not rounded."""
        weight, given = (rows, x) if factors is None else (rows * factors, x / factors)
        rounded = weight
        if not exact:
            values = np.ascontiguousarray(weight.numpy())
            grid = rounding.fit(values, bits, offsets=bits == 4 and values.shape[1] % BLOCK == 0)
            codes = rounding.codes_of(values, grid, bits)
            rounded = torch.from_numpy(rounding.values_of(codes, grid)[:, : values.shape[1]])
        expected = x @ rows.T
        apart = rounded_inputs(given) @ rounded.T - expected
        return float(apart.square().mean() / expected.square().mean().clamp(min=1e-30))


def rounded_inputs(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Return a product's inputs [..., in] as ONNX Runtime rounds them: to 8 bits, with one scale for each block."""
    columns = x.shape[-1]
    blocks = nn.functional.pad(x, (0, -columns % block)).unflatten(-1, (-1, block))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(blocks / torch.where(scales > 0, scales, 1))
    rounded: torch.Tensor = (codes * scales).flatten(-2)[..., :columns]
    return rounded
