"""The truth, and the plain model of each numerics class."""

from __future__ import annotations

import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.tiers.tier import Numerics

DTYPES = (torch.bfloat16, torch.float32)
"""What layers are made of."""
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
    if input_dtype not in DTYPES or shared.dtype != input_dtype:
        raise InputError(f"partials are both bfloat16 or both float32, not {routed.dtype} and {shared.dtype}")
    check_pair(numerics, input_dtype, pair)
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


def check_pair(numerics: Numerics, dtype: torch.dtype, pair: bool) -> None:
    if pair and (numerics is not Numerics.K0 or dtype != torch.bfloat16):
        raise InputError(f"a BF16 pair is a form of K0 in bfloat16, not of {numerics.name} in {dtype}")
