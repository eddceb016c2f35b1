"""The deferred finalize: expert outputs that are not yet weighted and summed, made into routed partial sums.

    routed[t, c] = sum over ascending k with permuted_index[t, k] >= 0 of weights[t, k] * rows[permuted_index[t, k], c]

in fp32 with one rounding at the end. A product of two BF16 numbers is exact in fp32; with fp32 weights each step is one
fused multiply-add. A slot of -1 (not on this rank, or padding) contributes nothing, and no row is read on its account.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError

MAX_TOP_K = 64
"""The largest number of slots a token: what the fused kernels hold in registers."""


@attrs.frozen(eq=False)
class Deferred:
    """Expert outputs that are not finalised.

    Attributes:
        rows: [R, >= L], BF16 or fp32; columns past L are padding. R may be 0.
        weights: [m*K] or [m, K], in the rows' dtype or fp32; never cast.
        permuted_index: [m*K] or [m, K], int32: slot t*K+k -> row, or -1.
        num_tokens: m.
    """

    rows: Tensor
    weights: Tensor
    permuted_index: Tensor
    num_tokens: int

    def check(self, latent_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises InputError that says what was given and what is accepted."""
        for name, x in (("rows", self.rows), ("expert_weights", self.weights), ("permuted_index", self.permuted_index)):
            if not isinstance(x, Tensor):
                raise InputError(f"{name}: {type(x).__name__} given; accepted is a tensor")
            if x.device != device:
                raise InputError(f"{name}: on {x.device}; accepted is {device}")
        if type(self.num_tokens) is not int or self.num_tokens < 0:
            raise InputError(f"num_tokens: {self.num_tokens!r} given; accepted are whole numbers from 0")
        if self.rows.dim() != 2 or self.rows.shape[1] < latent_size:
            raise InputError(
                f"rows: shape {tuple(self.rows.shape)} given; accepted is [R, n] with n at least {latent_size}"
            )
        if self.rows.dtype != dtype:
            raise InputError(f"rows: {self.rows.dtype} given; accepted is {dtype}")
        if self.weights.dtype not in (dtype, torch.float32):
            raise InputError(f"expert_weights: {self.weights.dtype} given; accepted are {dtype} and torch.float32")
        for name, x in (("expert_weights", self.weights), ("permuted_index", self.permuted_index)):
            if x.dim() not in (1, 2) or (x.dim() == 2 and x.shape[0] != self.num_tokens):
                raise InputError(
                    f"{name}: shape {tuple(x.shape)} given; accepted are [m*K] and [m, K], m = {self.num_tokens}"
                )
        if self.permuted_index.dtype != torch.int32:
            raise InputError(f"permuted_index: {self.permuted_index.dtype} given; accepted is torch.int32")
        slots = self.permuted_index.numel()
        if self.weights.numel() != slots:
            raise InputError(f"expert_weights: {self.weights.numel()} given; accepted are {slots}, one a slot")
        m = self.num_tokens
        if slots % m if m else slots:
            raise InputError(f"permuted_index: {slots} slots given; accepted are K for each of the {m} tokens")
        if device.type == "cpu" and slots:  # on a GPU a look at the values would wait for them
            least, most = int(self.permuted_index.min()), int(self.permuted_index.max())
            if least < -1 or most >= self.rows.shape[0]:
                bad = least if least < -1 else most
                raise InputError(
                    f"permuted_index: {bad} given; accepted are -1 and the {self.rows.shape[0]} rows from 0"
                )
        if m and not 0 < slots // m <= MAX_TOP_K:
            raise InputError(f"permuted_index: {slots // m} slots a token given; accepted are 1 to {MAX_TOP_K}")


def finalize(deferred: Deferred, latent_size: int) -> Tensor:
    """The routed partial sums [m, L] in the rows' dtype.

    Indices are the caller's: `Deferred.check` looks at them on CPU only.
    """
    m, rows = deferred.num_tokens, deferred.rows
    total = torch.zeros(m, latent_size, dtype=torch.float64, device=rows.device)
    if m:
        index = deferred.permuted_index.reshape(m, -1)
        weights = deferred.weights.reshape(m, -1)
        for k in range(index.shape[1]):
            tokens = (index[:, k] >= 0).nonzero().squeeze(1)
            chosen = rows[index[tokens, k].long(), :latent_size]
            product = weights[tokens, k, None].double() * chosen.double()  # exact: 24 and at most 24 bits
            total[tokens] = _add_odd(total[tokens], product).float().double()
    return total.to(torch.float32).to(rows.dtype)


def _add_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b in float64, rounded to odd: rounding that to fp32 gives what an fma of the exact sum gives, ties too."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.contiguous().view(torch.int64) & 1) == 0
    away = torch.where(error > 0, torch.inf, -torch.inf)
    return torch.where((error != 0) & even & error.isfinite(), torch.nextafter(total, away.to(total)), total)
