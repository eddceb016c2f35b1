"""Data that is the same on every rank and process: distributed as the bounds ask for, or exact in any order."""

from __future__ import annotations

import hashlib

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.kernels.reference._truth import DTYPES, model, moe_tail
from k3comm.tiers.tier import Numerics


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
    if dtype not in DTYPES:
        raise InputError(f"layers are bfloat16 or float32, not {dtype}")
    if world_size < 1 or num_tokens < 0 or hidden < 1 or latent < 1:
        raise InputError(
            f"world_size, hidden and latent start at 1, num_tokens at 0, not world_size={world_size}, "
            f"num_tokens={num_tokens}, hidden={hidden}, latent={latent}"
        )
