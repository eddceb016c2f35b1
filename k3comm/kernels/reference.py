"""What the MoE tail means: the truth in float64, the plain model of each numerics class, and how far results may stray.

    out = residual + routed_scale * (W_up @ rmsnorm(sum_r routed_r; g, eps)) + b + sum_r shared_r          [m, H]

`moe_tail` is that line in float64, never rounded. `model` is the plainest code that keeps the promises of a class
(docs/tiers.md, numerics classes), rounded to the input dtype as the class says. `AccuracyMeter` compares a result with
the truth and `accept` judges the comparison. `random_case` and `integer_case` make data that is the same on every rank.
Shapes everywhere: W ranks, m tokens, L latent width, H hidden width.

What the classes are worth, measured with this module on a CPU (4096 rows of `random_case`, 512 for the pair; W = 8,
H = 7168, L = 3584; `Accuracy` defines the columns; the biases have a standard error of up to 1e-6):

    |                                        | error   | misrounded | bias    | paired bias |
    |----------------------------------------|---------|------------|---------|-------------|
    | the truth, rounded once                | 2.13e-3 | 0          | -2.6e-6 | 0           |
    | K0, z in fp32                          | 2.13e-3 | 0.0001     | -2.6e-6 | 1e-8        |
    | K0, z as a BF16 pair                   | 2.13e-3 | 0.0019     | -2.3e-6 | 1e-8        |
    | K1                                     | 2.67e-3 | 0.36       | -4.3e-6 | -1.7e-6     |
    | K2 if its sums were rounded only once  | 3.15e-3 | 0.45       | -5.8e-6 | -3.2e-6     |
    | K2, the model below                    | 4.55e-3 | 0.58       | -8.6e-6 | -6.0e-6     |

Three choices, and why:

- *The projection of the models is summed by hand*: exact products, float64 inside a slice of L, slices added in fp32 in
  order. An fp32 `torch.matmul` isn't one: with `torch.set_float32_matmul_precision("medium")`, which serving engines
  set, it multiplies in BF16 on a CPU that can (and in TF32 on a GPU under "high"), and a reference that follows a
  global switch says that a right kernel is wrong.
- *K2 is modelled as a ring*: the partial sums are added in rank order and rounded to the input dtype after every
  addition. A ring rounds at each of its W - 1 hops, and so do its chunks whatever rank they start from; trees and
  recursive halving round as often but smaller sums, and a reduction in a switch or in fp32 rounds once. A real
  all-reduce should therefore not exceed it on data whose ranks are alike, such as `random_case` (gloo at W = 2, 4 and 8
  comes within 0.3 % of it, and within 1.5 % on four rows); where one rank's partials are much larger than the others',
  the order decides, and the model is one order of many.
- *The correctly rounded result is computed, not cast*: torch casts float64 to BF16 through float32, which rounds twice
  and goes wrong next to a tie (`round_once`).
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.tiers.tier import Numerics

__all__ = [
    "FLOAT32_ERROR",
    "K0_BIAS_ROWS",
    "K0_ERROR_OVER_IDEAL",
    "K0_MISROUNDED",
    "K0_PAIRED_BIAS",
    "K0_PAIR_MISROUNDED",
    "K1_ERROR",
    "K1_MISROUNDED",
    "K1_PAIRED_BIAS",
    "K2_ERROR_OVER_SEPARATE_REDUCE",
    "OVER_MODEL",
    "POOL_ROWS",
    "Accuracy",
    "AccuracyMeter",
    "Bound",
    "Case",
    "Quantity",
    "accept",
    "bounds_for",
    "integer_case",
    "measure",
    "model",
    "moe_tail",
    "random_case",
    "rms_norm",
    "round_once",
]

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

_DTYPES = (torch.bfloat16, torch.float32)
# Any length is a valid order of fp32 additions; at K3 widths 16 misrounds 2.2e-4 of K0's elements, 128 1.0e-4, all of
# L in one slice 0.7e-4, an sgemm 3.4e-4.
_PROJECTION_SLICE = 128


@torch.no_grad()
def moe_tail(
    routed: Tensor,
    shared: Tensor,
    up_weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float,
    up_bias: Tensor | None = None,
    routed_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The finished layer, computed in `dtype` and never rounded to anything narrower.

    Args:
        routed: `[W, m, L]`, every rank's partial sum of the routed experts.
        shared: `[W, m, H]`, every rank's partial sum of the shared experts.
        up_weight: `[H, L]`, the whole up-projection.
        residual: `[m, H]`, or None for a layer without.
        norm_weight: `[L]`. None means no norm at all: the sum goes straight into the projection.
        eps: added to the mean square; unused without a norm.
        up_bias: `[H]`, added once, or None.
        routed_scale: multiplies the projected routed part only.
        dtype: float64, or float32 for a coarser and cheaper truth.

    Returns:
        `[m, H]` in `dtype`, on the inputs' device.

    Raises:
        InputError: shapes that don't belong together, or a `dtype` that is neither float64 nor float32.
    """
    if dtype not in (torch.float64, torch.float32):
        raise InputError(f"the truth is computed in float64 or float32, not in {dtype}")
    _check_shapes(routed, shared, up_weight, residual, norm_weight, up_bias)
    z = _rank_order_sum(routed, dtype)
    if norm_weight is not None:
        z = rms_norm(z, norm_weight, eps, dtype)
    return _finish(_project(z, up_weight), _rank_order_sum(shared, dtype), residual, up_bias, routed_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in `dtype` and not rounded.

    The latent norm and the next layer's norm alike. `x` is `[..., n]`, `weight` `[n]`; returns `[..., n]` in `dtype`.
    """
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


@torch.no_grad()
def model(
    numerics: Numerics,
    routed: Tensor,
    shared: Tensor,
    up_weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float,
    up_bias: Tensor | None = None,
    routed_scale: float = 1.0,
    pair: bool = False,
) -> Tensor:
    """The plain model of a numerics class: the least that a tier of that class may do, and no better.

    K0: fp32 sums in rank order 0..W-1, mean square in fp32 of those sums, z in fp32 for the projection (`pair`: as BF16
    high + low terms), then fp32 additions (shared sum, bias, residual) and one rounding. K1: the same with z rounded to
    the input dtype. K2: partial sums rounded to the input dtype after every addition, then as K1. With float32 inputs
    the roundings to the input dtype do nothing, so the three classes are the same code.

    Args:
        numerics: the class.
        routed: `[W, m, L]`, bfloat16 or float32; this is the input dtype.
        shared: `[W, m, H]`, of the input dtype.
        up_weight: `[H, L]`; read as it is, in any floating dtype.
        residual: `[m, H]` or None.
        norm_weight: `[L]`, or None for no norm at all.
        eps: added to the mean square.
        up_bias: `[H]` or None.
        routed_scale: multiplies the projected routed part only.
        pair: K0 in bfloat16 only.

    Returns:
        `[m, H]` in the input dtype. The bits of K0 and K1 sums follow the rank order; the order of what follows the
        sums is not part of a class.

    Raises:
        InputError: shapes or dtypes that don't belong together, or `pair` where there is none.
    """
    _check_shapes(routed, shared, up_weight, residual, norm_weight, up_bias)
    input_dtype = routed.dtype
    if input_dtype not in _DTYPES or shared.dtype != input_dtype:
        raise InputError(f"partials are both bfloat16 or both float32, not {routed.dtype} and {shared.dtype}")
    _check_pair(numerics, input_dtype, pair)
    summed = _hop_rounded_sum if numerics is Numerics.K2 else _rank_order_sum_fp32
    z = summed(routed)
    if norm_weight is not None:
        z = rms_norm(z, norm_weight, eps, torch.float32)
    if pair:
        high = z.to(input_dtype)
        # An infinite high term has no remainder: inf - inf would make a NaN of it.
        low = torch.where(high.isfinite(), z - high, 0.0).to(input_dtype)
        projected = _project(high.float(), up_weight) + _project(low.float(), up_weight)
    else:
        projected = _project(z if numerics is Numerics.K0 else z.to(input_dtype).float(), up_weight)
    return _finish(projected, summed(shared), residual, up_bias, routed_scale).to(input_dtype)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` correctly rounded to `dtype` (nearest, ties to even), also from float64 to BF16.

    `Tensor.to` goes through float32 there and rounds 1 + 2^-8 + 2^-40 down to 1. This rounds to float32 with the last
    bit kept odd where something was lost, so the second rounding sees on which side of a tie it was.
    """
    if x.dtype != torch.float64 or dtype in (torch.float64, torch.float32):
        return x.to(dtype)
    near = x.to(torch.float32)
    back = near.double()
    away = torch.where(x > back, torch.inf, -torch.inf).to(torch.float32)
    lost_and_even = (back != x) & (near.view(torch.int32) & 1 == 0)
    return torch.where(lost_and_even, torch.nextafter(near, away), near).to(dtype)


def _rank_order_sum(partials: Tensor, dtype: torch.dtype) -> Tensor:
    # Starts from rank 0's values, not from zero: zero would turn -0.0 into +0.0.
    total = partials[0].to(dtype)
    for partial in partials[1:]:
        total = total + partial.to(dtype)
    return total


def _rank_order_sum_fp32(partials: Tensor) -> Tensor:
    return _rank_order_sum(partials, torch.float32)


def _hop_rounded_sum(partials: Tensor) -> Tensor:
    total = partials[0]
    for partial in partials[1:]:
        total = (total.float() + partial.float()).to(partials.dtype)
    return total.float()


def _project(z: Tensor, up_weight: Tensor) -> Tensor:
    """`z [m, L] @ up_weight[H, L].T` in z's dtype, float64 or float32; the module's docstring says why not `matmul`."""
    wide = up_weight.double()
    if z.dtype == torch.float64:
        return z @ wide.T
    total = z.new_zeros(z.shape[0], up_weight.shape[0])
    slices = zip(z.double().split(_PROJECTION_SLICE, -1), wide.split(_PROJECTION_SLICE, -1), strict=True)
    for z_slice, weight_slice in slices:
        total = total + (z_slice @ weight_slice.T).to(z.dtype)
    return total


def _finish(
    projected: Tensor, shared_sum: Tensor, residual: Tensor | None, up_bias: Tensor | None, routed_scale: float
) -> Tensor:
    out = projected * routed_scale + shared_sum
    if up_bias is not None:
        out = out + up_bias.to(out.dtype)
    if residual is not None:
        out = out + residual.to(out.dtype)
    return out


def _check_shapes(
    routed: Tensor,
    shared: Tensor,
    up_weight: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    up_bias: Tensor | None,
) -> None:
    if routed.dim() != 3 or shared.dim() != 3 or routed.shape[:2] != shared.shape[:2] or routed.shape[0] == 0:
        raise InputError(
            f"routed [W, m, L] and shared [W, m, H] need equal W >= 1 and m, "
            f"not {list(routed.shape)} and {list(shared.shape)}"
        )
    _, num_tokens, latent = routed.shape
    hidden = shared.shape[2]
    expected: tuple[tuple[str, Tensor | None, list[int]], ...] = (
        ("up_weight", up_weight, [hidden, latent]),
        ("residual", residual, [num_tokens, hidden]),
        ("norm_weight", norm_weight, [latent]),
        ("up_bias", up_bias, [hidden]),
    )
    for name, tensor, shape in expected:
        if tensor is not None and list(tensor.shape) != shape:
            raise InputError(f"{name} must be {shape} beside these partials, not {list(tensor.shape)}")


def _check_pair(numerics: Numerics, dtype: torch.dtype, pair: bool) -> None:
    if pair and (numerics is not Numerics.K0 or dtype != torch.bfloat16):
        raise InputError(f"a BF16 pair is a form of K0 in bfloat16, not of {numerics.name} in {dtype}")


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
    if dtype not in _DTYPES:
        raise InputError(f"layers are bfloat16 or float32, not {dtype}")
    _check_pair(numerics, dtype, pair)
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


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """One layer's inputs for one call, of all ranks: what `random_case` and `integer_case` make.

    All tensors have the layer's dtype and lie on one device: the CPU, until `to` moves them. Cases compare by identity.
    """

    routed: Tensor
    """`[W, m, L]`; `routed[r]` is rank r's."""
    shared: Tensor
    """`[W, m, H]`; `shared[r]` is rank r's."""
    up_weight: Tensor
    """`[H, L]`."""
    residual: Tensor | None
    """`[m, H]` or None."""
    norm_weight: Tensor | None
    """`[L]`, or None for no norm at all."""
    up_bias: Tensor | None
    """`[H]` or None."""
    routed_scale: float
    eps: float

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return self.routed.dtype

    def truth(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """`moe_tail` of this case: `[m, H]` in `dtype`."""
        return moe_tail(
            self.routed,
            self.shared,
            self.up_weight,
            residual=self.residual,
            norm_weight=self.norm_weight,
            eps=self.eps,
            up_bias=self.up_bias,
            routed_scale=self.routed_scale,
            dtype=dtype,
        )

    def model(self, numerics: Numerics, *, pair: bool = False) -> Tensor:
        """`model` of this case: `[m, H]` in the case's dtype."""
        return model(
            numerics,
            self.routed,
            self.shared,
            self.up_weight,
            residual=self.residual,
            norm_weight=self.norm_weight,
            eps=self.eps,
            up_bias=self.up_bias,
            routed_scale=self.routed_scale,
            pair=pair,
        )

    def to(self, device: torch.device | str) -> Case:
        """The same case on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return attrs.evolve(
            self,
            routed=self.routed.to(device),
            shared=self.shared.to(device),
            up_weight=self.up_weight.to(device),
            residual=moved(self.residual),
            norm_weight=moved(self.norm_weight),
            up_bias=moved(self.up_bias),
        )


def random_case(
    world_size: int,
    num_tokens: int,
    hidden: int,
    latent: int,
    *,
    dtype: torch.dtype,
    seed: int,
    residual_sigma: float | None = 1.0,
    norm: bool = True,
    bias: bool = False,
    routed_scale: float = 1.0,
    eps: float = 1e-5,
    layer: Case | None = None,
) -> Case:
    """Data distributed as in the simulation that the bounds come from (docs/tiers.md, numerics classes).

    Partials are N(0, 0.1), `W_up` N(0, 0.02), the residual N(0, residual_sigma), the norm weight 1 + N(0, 0.1), the
    bias N(0, 0.1); all standard deviations. Made on the CPU, in float64 before the rounding to `dtype`, from generators
    of its own: the same on every rank and process, and the global random state is left alone. A rank's partials don't
    depend on the number of ranks.

    Args:
        world_size: W, at least 1.
        num_tokens: m, at least 0.
        hidden: H.
        latent: L.
        dtype: bfloat16 or float32.
        seed: any integer.
        residual_sigma: 8 makes the outliers of a deep network's residual; None is a layer without residual.
        norm: False is a layer without latent norm.
        bias: whether the up-projection has a bias.
        routed_scale: the layer's.
        eps: the layer's; 1e-5 is Kimi-K3's `rms_norm_eps`.
        layer: a case whose weights are taken over instead of made, to pool many calls of one layer cheaply. The new
            case lies on its device.

    Raises:
        InputError: sizes out of range, a dtype that is not served, or a `layer` of another form.
    """
    _check_case(world_size, num_tokens, hidden, latent, dtype)

    def normal(name: str, *shape: int, sigma: float, mean: float = 0.0) -> Tensor:
        generator = _generator(seed, name)
        values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (values * sigma + mean).to(dtype)

    def per_rank(name: str, width: int) -> Tensor:
        return torch.stack([normal(f"{name} {rank}", num_tokens, width, sigma=0.1) for rank in range(world_size)])

    if layer is None:
        up_weight = normal("up_weight", hidden, latent, sigma=0.02)
        norm_weight = normal("norm_weight", latent, sigma=0.1, mean=1.0) if norm else None
        up_bias = normal("up_bias", hidden, sigma=0.1) if bias else None
    else:
        up_weight, norm_weight, up_bias = layer.up_weight, layer.norm_weight, layer.up_bias
        asked = (hidden, latent, dtype, norm, bias, routed_scale, eps)
        given = (*up_weight.shape, layer.dtype, norm_weight is not None, up_bias is not None)
        if asked != (*given, layer.routed_scale, layer.eps):
            raise InputError(
                f"the layer taken over has (hidden, latent, dtype, norm, bias, routed_scale, eps) = "
                f"{(*given, layer.routed_scale, layer.eps)}, asked is {asked}"
            )
    device = up_weight.device
    residual = None if residual_sigma is None else normal("residual", num_tokens, hidden, sigma=residual_sigma)
    return Case(
        routed=per_rank("routed", latent).to(device),
        shared=per_rank("shared", hidden).to(device),
        up_weight=up_weight,
        residual=None if residual is None else residual.to(device),
        norm_weight=norm_weight,
        up_bias=up_bias,
        routed_scale=routed_scale,
        eps=eps,
    )


def integer_case(
    world_size: int,
    num_tokens: int,
    hidden: int,
    latent: int,
    *,
    dtype: torch.dtype,
    seed: int,
    residual: bool = True,
    norm: bool = True,
    bias: bool = False,
    routed_scale: float = 1.0,
    eps: float = 1e-5,
) -> Case:
    """Data on which every class, and any order of any sum, must give the bits of the truth rounded once.

    For self-checks with no tolerance. All values are integers, and no sum of partials, in whatever order and grouping,
    exceeds 256 in size, so BF16 holds every one exactly. Each row of the summed latent is +-c with c = 16 or 32, so the
    norm gives +-g, and eps is too small to survive the rounding that follows (without norm c is 1 or 2). Every output
    is an odd integer of at most 256: never zero, where an error of 1e-5 would show. Each rank's partials, latent column
    and row of `W_up` counts: leaving one out changes the result.

    In float32 there is no rounding for eps to vanish in: without norm the bits are exact there too, with it only the
    sums are.

    Args:
        world_size: W, 1 to 32.
        num_tokens: m, at least 0.
        hidden: H.
        latent: L, at most 36 times `hidden`.
        dtype: bfloat16 or float32.
        seed: any integer.
        residual: whether the layer has a residual.
        norm: False is a layer without latent norm.
        bias: whether the up-projection has a bias.
        routed_scale: 0.5, 1 or 2.
        eps: 0 to 5e-3.

    Raises:
        InputError: sizes or figures out of range, or a dtype that is not served.
    """
    _check_case(world_size, num_tokens, hidden, latent, dtype)
    taps = min(latent, max(4, -(-latent // hidden)))
    if world_size > 32 or taps > 36 or routed_scale not in (0.5, 1.0, 2.0) or not 0.0 <= eps <= 5e-3:
        raise InputError(
            f"exact integers need world_size <= 32, latent <= 36 hidden, routed_scale 0.5, 1 or 2, 0 <= eps <= 5e-3; "
            f"not world_size={world_size}, hidden={hidden}, latent={latent}, routed_scale={routed_scale}, eps={eps}"
        )

    def integers(name: str, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=_generator(seed, name), dtype=torch.int64, device="cpu")

    def signs(name: str, *shape: int) -> Tensor:
        return 2 * integers(name, 0, 1, *shape) - 1

    def split(name: str, total: Tensor, size: int) -> Tensor:
        """Integers of at most `size`, and one that completes the total: another rank's in each column."""
        parts = integers(name, -size, size, world_size, *total.shape)
        columns = torch.arange(total.shape[1], device="cpu")
        closing = columns % world_size
        parts[closing, :, columns] = 0
        parts[closing, :, columns] = (total - parts.sum(0)).T
        return parts.to(dtype)

    # The sizes of all partials of an element add up to at most c + 2 (W - 1) size <= 256; shared: 65 + 2 (W - 1) size.
    size = min(8, (256 - 65) // (2 * max(world_size - 1, 1)))
    magnitude = integers("magnitude", 1, 2, num_tokens, 1) * (16 if norm else 1)
    latent_sum = signs("latent", num_tokens, latent) * magnitude
    shared_sum = 2 * integers("shared", -32, 31, num_tokens, hidden) + 1
    # Row i of W_up reads `taps` neighbouring columns, the next row the next ones: all columns are read.
    first = torch.arange(hidden, device="cpu")[:, None] * taps
    taken = (first + torch.arange(taps, device="cpu")) % latent
    weights = torch.zeros(hidden, latent, dtype=torch.float64, device="cpu")
    weights.scatter_(1, taken, (signs("up_weight", hidden, taps) * 2).double() / routed_scale)
    return Case(
        routed=split("routed parts", latent_sum, size),
        shared=split("shared parts", shared_sum, size),
        up_weight=weights.to(dtype),
        residual=(2 * integers("residual", -16, 16, num_tokens, hidden)).to(dtype) if residual else None,
        norm_weight=integers("norm_weight", 1, 2, latent).to(dtype) if norm else None,
        up_bias=(2 * integers("up_bias", -4, 4, hidden)).to(dtype) if bias else None,
        routed_scale=routed_scale,
        eps=eps,
    )


def _generator(seed: int, name: str) -> torch.Generator:
    # torch's CPU generator uses the low 32 bits of a seed, so neighbouring seeds and names are hashed apart.
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:4], "little"))


def _check_case(world_size: int, num_tokens: int, hidden: int, latent: int, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise InputError(f"layers are bfloat16 or float32, not {dtype}")
    if world_size < 1 or num_tokens < 0 or hidden < 1 or latent < 1:
        raise InputError(
            f"world_size, hidden and latent start at 1, num_tokens at 0, not world_size={world_size}, "
            f"num_tokens={num_tokens}, hidden={hidden}, latent={latent}"
        )
