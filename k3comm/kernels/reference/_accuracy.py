"""How far results stray from the truth, and how far they may."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.kernels.reference._truth import DTYPES, check_pair, round_once
from k3comm.tiers.tier import Numerics

K0_MISROUNDED = 1e-3
"""K0 with z in fp32 or as three BF16 terms: share of misrounded elements. Source: docs/tiers.md, numerics classes."""
K0_PAIR_MISROUNDED = 3e-3
"""K0 with z as a BF16 high + low pair: share of misrounded elements. Source: docs/tiers.md, numerics classes."""
K0_PAIRED_BIAS = 2e-6
"""K0: |paired bias| of any call of `K0_BIAS_ROWS` rows or more. Source: docs/tiers.md, numerics classes."""
K0_BIAS_ROWS = 16
"""Rows from which `K0_PAIRED_BIAS` is judged; fewer rows are too noisy. Source: docs/tiers.md, numerics classes."""
K0_ERROR_OVER_IDEAL = 1.01
"""K0: error over that of the truth rounded once. The other K0 bounds are blind to one wild element in a large call; the
table above has the two errors equal to five digits. Source: this module's measurement."""
K1_MISROUNDED = 0.40
"""K1 on the K3-like distribution: share of misrounded elements. Source: docs/tiers.md, numerics classes."""
K1_ERROR = 2.75e-3
"""K1 on the K3-like distribution: error. Source: docs/tiers.md, numerics classes."""
K1_PAIRED_BIAS = 5e-6
"""K1 on the K3-like distribution: |paired bias| pooled over `POOL_ROWS`. Source: docs/tiers.md, numerics classes."""
OVER_MODEL = 1.05
"""K1 on other data (error and misrounded) and SEPARATE_REDUCE (error): over the class's plain model on the same data.
Source: docs/tiers.md, numerics classes."""
K2_ERROR_OVER_SEPARATE_REDUCE = 1.02
"""K2: error over SEPARATE_REDUCE's on the same data, pooled over `POOL_ROWS`.
Source: docs/tiers.md, numerics classes."""
POOL_ROWS = 4096
"""Rows to pool before a bound that says "pooled" is judged. Source: docs/tiers.md, numerics classes."""
FLOAT32_ERROR = 5e-6
"""Float32 layers, any class: error. At K3 widths the model has 1.4e-7, torch's fp32 operators 3.5e-7, one accumulator
that runs through all of L 1.1e-6, three BF16 products 4.3e-6, TF32 operands 2.9e-4: the bound admits every fp32
accumulation and keeps TF32 out. Source: docs/tiers.md, numerics classes, and this module's measurement."""

Quantity: TypeAlias = Literal["error", "error_over_ideal", "misrounded", "bias", "paired_bias"]
"""What of an `Accuracy` a `Bound` limits: a field, or `error_over_ideal` = error / ideal_error."""


@attrs.frozen(kw_only=True)
class Accuracy:
    """How far a result `out` is from the truth `x`, pooled over rows. Pure numbers, no units.

    "The layer's own contribution" is x - residual: the residual is only passed through, and a large one would hide
    errors. Elements that are not finite even when correctly rounded have no distance, so they enter `misrounded` alone;
    a result that is not finite where it should be makes the error infinite or NaN, which no bound accepts. Figures of
    no elements at all are NaN too.
    """

    error: float
    """rms(out - x) / rms(x - residual)."""
    misrounded: float
    """Share of elements that differ from x rounded once. Zeros of either sign are equal, and so are NaNs."""
    bias: float
    """<out - x, x> / <x, x>, signed: by how much the layer's output is stretched or shrunk."""
    paired_bias: float
    """<out - r, x> / <x, x> with r = x rounded once: the bias without that of the format itself."""
    ideal_error: float
    """rms(r - x) / rms(x - residual): the error of the best possible result."""
    rows: int
    """How many rows were pooled."""


@attrs.define(kw_only=True)
class AccuracyMeter:
    """Sums from which an `Accuracy` follows, so that thousands of wide rows can be pooled call by call.

    Only numbers are kept (float64 sums, exact counts), so meters can be pickled and sent between ranks. Pooling in
    pieces equals pooling at once up to the order of float64 additions.
    """

    _squared_error: float = 0.0
    _squared_ideal_error: float = 0.0
    _squared_contribution: float = 0.0
    _squared_truth: float = 0.0
    _stretch: float = 0.0
    _paired_stretch: float = 0.0
    _misrounded: int = 0
    _elements: int = 0
    _rows: int = 0

    @torch.no_grad()
    def add(self, out: Tensor, truth: Tensor, residual: Tensor | None = None) -> None:
        """Take in one call.

        Args:
            out: `[m, H]`, bfloat16 or float32: the result.
            truth: `[m, H]`, float64: what `moe_tail` says (float32 is accepted, and is as coarse as it is).
            residual: `[m, H]`, or None for a layer without.

        Raises:
            InputError: shapes that differ, or a truth that is no wider than the result's dtype.
        """
        if out.dim() != 2 or out.shape != truth.shape or (residual is not None and residual.shape != out.shape):
            given = [list(tensor.shape) for tensor in (out, truth, residual) if tensor is not None]
            raise InputError(f"out, truth and residual must all be [m, H], not {given}")
        if truth.dtype not in (torch.float64, torch.float32) or truth.dtype.itemsize <= out.dtype.itemsize:
            raise InputError(f"the truth must be wider than the result's {out.dtype}, not {truth.dtype}")
        ideal = round_once(truth, out.dtype)
        judged = ideal.isfinite()
        x = torch.where(judged, truth.double(), 0.0)
        difference = torch.where(judged, out.double() - x, 0.0)
        ideal_difference = torch.where(judged, ideal.double() - x, 0.0)
        paired = torch.where(judged, out.double() - ideal.double(), 0.0)
        contribution = x if residual is None else torch.where(judged, x - residual.double(), 0.0)
        self._squared_error += difference.square().sum().item()
        self._squared_ideal_error += ideal_difference.square().sum().item()
        self._squared_contribution += contribution.square().sum().item()
        self._squared_truth += x.square().sum().item()
        self._stretch += (difference * x).sum().item()
        self._paired_stretch += (paired * x).sum().item()
        self._misrounded += int(((out != ideal) & ~(out.isnan() & ideal.isnan())).sum().item())
        self._elements += out.numel()
        self._rows += out.shape[0]

    def merge(self, other: AccuracyMeter) -> None:
        """Take in everything that another meter took in."""
        for field in attrs.fields(AccuracyMeter):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def result(self) -> Accuracy:
        """The figures of everything taken in so far."""
        if self._elements == 0:
            return Accuracy(
                error=math.nan, misrounded=math.nan, bias=math.nan, paired_bias=math.nan, ideal_error=math.nan, rows=0
            )
        return Accuracy(
            error=math.sqrt(_ratio(self._squared_error, self._squared_contribution)),
            misrounded=self._misrounded / self._elements,
            bias=_ratio(self._stretch, self._squared_truth),
            paired_bias=_ratio(self._paired_stretch, self._squared_truth),
            ideal_error=math.sqrt(_ratio(self._squared_ideal_error, self._squared_contribution)),
            rows=self._rows,
        )


def measure(out: Tensor, truth: Tensor, residual: Tensor | None = None) -> Accuracy:
    """The accuracy of one call: `AccuracyMeter.add` and `AccuracyMeter.result`."""
    meter = AccuracyMeter()
    meter.add(out, truth, residual)
    return meter.result()


def _ratio(numerator: float, denominator: float) -> float:
    if denominator != 0.0:
        return numerator / denominator
    return numerator if numerator == 0.0 or math.isnan(numerator) else math.copysign(math.inf, numerator)


@attrs.frozen(kw_only=True)
class Bound:
    """One limit on one figure of an `Accuracy`. Prints as a table's cell: `misrounded < 0.001`.

    Biases are limited in size, whatever their sign. NaN is never within a bound.
    """

    quantity: Quantity
    limit: float
    inclusive: bool = False
    """True for "at most", which is how ratios to another figure are limited: exact data makes both zero."""
    min_rows: int = 1
    """Rows that must have been pooled before the bound can be judged."""
    source: str
    """Where the limit comes from, for a reader: `absolute`, `1.05 x the plain model`, ..."""

    def value(self, accuracy: Accuracy) -> float:
        """The figure that is limited; biases without their sign."""
        figures: dict[Quantity, float] = {
            "error": accuracy.error,
            "error_over_ideal": _ratio(accuracy.error, accuracy.ideal_error),
            "misrounded": accuracy.misrounded,
            "bias": abs(accuracy.bias),
            "paired_bias": abs(accuracy.paired_bias),
        }
        return figures[self.quantity]

    def applies(self, accuracy: Accuracy) -> bool:
        """Whether enough rows were pooled to judge by this bound."""
        return accuracy.rows >= self.min_rows

    def holds(self, accuracy: Accuracy) -> bool:
        """Whether the figure is within the limit, whatever the number of rows."""
        value = self.value(accuracy)
        return value <= self.limit if self.inclusive else value < self.limit

    def __str__(self) -> str:
        name = f"|{self.quantity}|" if "bias" in self.quantity else self.quantity
        return f"{name} {'<=' if self.inclusive else '<'} {self.limit:.4g}"


def bounds_for(
    numerics: Numerics,
    *,
    dtype: torch.dtype,
    pair: bool = False,
    k3_like: bool = False,
    model: Accuracy | None = None,
    separate_reduce: Accuracy | None = None,
) -> tuple[Bound, ...]:
    """What a result of a class must keep (docs/tiers.md, numerics classes), one `Bound` a row of a table.

    Args:
        numerics: the class.
        dtype: the layer's, bfloat16 or float32. All classes are judged alike in float32.
        pair: K0 with z as a BF16 pair, which may misround a little more.
        k3_like: the data is `random_case`'s with norm, residual and K3's widths, where K1 has figures of its own.
        model: the accuracy of `model(numerics, ...)` on the same data, or on enough rows of it to stand for all: the
            model is slow. K1 on other data, and SEPARATE_REDUCE, need it; elsewhere it is not looked at.
        separate_reduce: SEPARATE_REDUCE's accuracy on the same data. K2 tiers need it; SEPARATE_REDUCE itself is judged
            without it, by the model.

    Raises:
        InputError: a dtype that is not served, `pair` outside K0 in bfloat16, or a needed accuracy that is missing.
    """
    if dtype not in DTYPES:
        raise InputError(f"layers are bfloat16 or float32, not {dtype}")
    check_pair(numerics, dtype, pair)
    if dtype == torch.float32:
        return (Bound(quantity="error", limit=FLOAT32_ERROR, source="absolute, float32"),)
    if numerics is Numerics.K0:
        limit = K0_PAIR_MISROUNDED if pair else K0_MISROUNDED
        return (
            Bound(quantity="misrounded", limit=limit, source="absolute, BF16 pair" if pair else "absolute"),
            Bound(quantity="paired_bias", limit=K0_PAIRED_BIAS, min_rows=K0_BIAS_ROWS, source="absolute"),
            Bound(
                quantity="error_over_ideal",
                limit=K0_ERROR_OVER_IDEAL,
                inclusive=True,
                source="the truth rounded once",
            ),
        )
    if numerics is Numerics.K1 and k3_like:
        return (
            Bound(quantity="misrounded", limit=K1_MISROUNDED, source="absolute, K3-like data"),
            Bound(quantity="error", limit=K1_ERROR, source="absolute, K3-like data"),
            Bound(quantity="paired_bias", limit=K1_PAIRED_BIAS, min_rows=POOL_ROWS, source="absolute, K3-like data"),
        )
    if numerics is Numerics.K2 and separate_reduce is not None:
        return (
            Bound(
                quantity="error",
                limit=K2_ERROR_OVER_SEPARATE_REDUCE * separate_reduce.error,
                inclusive=True,
                min_rows=POOL_ROWS,
                source=f"{K2_ERROR_OVER_SEPARATE_REDUCE} x SEPARATE_REDUCE",
            ),
        )
    if model is None:
        raise InputError(
            f"{numerics.name} on this data is judged beside {'SEPARATE_REDUCE or ' if numerics is Numerics.K2 else ''}"
            f"the class's plain model: give its accuracy"
        )
    source = f"{OVER_MODEL} x the plain model"
    error = Bound(quantity="error", limit=OVER_MODEL * model.error, inclusive=True, source=source)
    if numerics is Numerics.K2:
        return (error,)
    return (
        Bound(quantity="misrounded", limit=OVER_MODEL * model.misrounded, inclusive=True, source=source),
        error,
    )


def accept(
    numerics: Numerics,
    accuracy: Accuracy,
    *,
    model: Accuracy | None = None,
    dtype: torch.dtype,
    pair: bool = False,
    k3_like: bool = False,
    separate_reduce: Accuracy | None = None,
) -> list[str]:
    """Which of `bounds_for`'s bounds a result breaks, one line each: the figure, the bound, where it comes from.

    Bounds that need more rows than were pooled are left out; a result that none of its bounds can judge is refused, so
    that an empty list always means that something was checked. Shares need elements too: one misrounded element in 1024
    is a share of 0.001 and moves the paired bias by about 5e-6, so pool 100,000 elements or more (16 rows at K3's
    width) before judging real-valued data of narrow layers.

    Args:
        accuracy: what was measured. The rest is `bounds_for`'s.

    Returns:
        The violated bounds as text; empty when the result is accepted.

    Raises:
        InputError: as `bounds_for`; a `separate_reduce` of another number of rows; no bound that `accuracy.rows` can
            judge.
    """
    if separate_reduce is not None and separate_reduce.rows != accuracy.rows:
        raise InputError(
            f"SEPARATE_REDUCE must be measured on the same data: {separate_reduce.rows} rows beside {accuracy.rows}"
        )
    bounds = bounds_for(numerics, dtype=dtype, pair=pair, k3_like=k3_like, model=model, separate_reduce=separate_reduce)
    judged = [bound for bound in bounds if bound.applies(accuracy)]
    if not judged:
        least = min(bound.min_rows for bound in bounds)
        raise InputError(f"{accuracy.rows} rows are too few to judge {numerics.name} here: pool {least} or more")
    return [
        f"{bound.quantity} is {bound.value(accuracy):.4g}, allowed is {bound} ({bound.source})"
        for bound in judged
        if not bound.holds(accuracy)
    ]
