"""The arithmetic of a tail in plain torch, for tiers that leave communication to a library.

Everything between the collectives is fp32; rounding happens where the caller says and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROJECTION_BLOCK_BYTES = 8 << 20
"""The fp32 copy of a block of W_up on CPU, in bytes: within a core's share of the last-level cache. Converting in
blocks took 8.7 ms where the whole matrix took 37.6 ms (m = 1, 7168 x 3584, 2 cores; docs/performance.md)."""


ROWS_BLOCK_BYTES = 1 << 20
"""The same where every row passes over the block by itself: it stays in a core's own cache. 16 rows of 1792 x 3584 took
11.2 ms, and 23.2 ms with blocks of 8 MiB (one core; docs/performance.md)."""


def sum_ranks(parts: Tensor) -> Tensor:
    """The fp32 sum over ranks, added in rank order, so that every rank gets the same bits.

    Args:
        parts: [W, ...], BF16 or fp32.

    Returns:
        [...], fp32.
    """
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm in fp32; the mean square is that of `x` as it comes.

    Args:
        x: [m, n], fp32.
        weight: [n], or None to leave `x` as it is (a layer without norm).

    Returns:
        [m, n], fp32; `x` itself without a weight.
    """
    if weight is None:
        return x
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float(), eps)


def norm_into(out: Tensor | None, x: Tensor, weight: Tensor | None, eps: float) -> None:
    """The next layer's norm of finished rows `x`, rounded once into `out`; nothing where none is asked for.

    Args:
        out: [m, n], or None. x: [m, n], in any dtype. weight: [n], or None.
    """
    if out is not None and weight is not None:
        out.copy_(rms_norm(x.float(), weight, eps))


def split_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """RMSNorm in two factors, for an epilogue that applies the second one after the projection.

    Args:
        x: [m, n], fp32. weight: [n], or None for a layer without norm.

    Returns:
        x * weight [m, n] and rsqrt(mean square + eps) [m, 1], both fp32; x and None without a weight.
    """
    if weight is None:
        return x, None
    return x * weight.float(), torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)


def project_rows(z: Tensor, weight: Tensor) -> Tensor:
    """z @ weight.T in fp32, each row by itself: a row's bits depend neither on m nor on its place among the rows.

    A row goes in as three BF16 terms, which hold all of it: their products with BF16 weights are exact, so no global
    switch for fp32 matmuls (BF16 on some CPUs) can take the accuracy away.

    Args:
        z: [m, L], fp32. weight: [N, L], BF16, on CPU.

    Returns:
        [m, N], fp32.
    """
    rows = max(1, ROWS_BLOCK_BYTES // (4 * weight.shape[1]))
    out = z.new_empty(z.shape[0], weight.shape[0])
    # Always through the same buffer: a BLAS may choose its order by the address that it is given.
    terms, split = z.new_empty(3, z.shape[1]), _three_terms(z)
    for first in range(0, weight.shape[0], rows):
        block = weight[first : first + rows].float()
        for token in range(z.shape[0]):
            terms.copy_(split[token])
            high, middle, low = terms @ block.t()
            torch.add(low, middle, out=low)
            torch.add(low, high, out=out[token, first : first + rows])
    return out


def _three_terms(z: Tensor) -> Tensor:
    """z [m, L] in fp32 as BF16 terms that add up to it, high to low: [m, 3, L], fp32."""
    rest, terms = z, []
    for _ in range(3):
        term = rest.bfloat16().float()
        terms.append(term)
        # Where a term is infinite the next ones are nothing: inf - inf would make a NaN of it.
        rest = torch.where(term.isfinite(), rest - term, 0.0)
    return torch.stack(terms, dim=1)


def project(z: Tensor, weight: Tensor, *, precise: bool = False) -> Tensor:
    """z @ weight.T with fp32 accumulation and an fp32 result.

    Args:
        z: [m, L], fp32. Rounded to the weight's dtype first unless `precise`.
        weight: [N, L], BF16 or fp32.
        precise: keep z, as a BF16 high + low pair: two terms whose products with BF16 weights are exact, so no global
            switch for fp32 matmuls (TF32, or BF16 on some CPUs) can take the accuracy away.

    Returns:
        [m, N], fp32.
    """
    if weight.dtype == torch.float32:
        return z @ weight.t()
    terms = z.to(weight.dtype)
    if precise:
        # Where the high term is infinite the low one is nothing: inf - inf would make a NaN of it.
        low = torch.where(terms.isfinite(), z - terms, 0.0)
        terms = torch.cat((terms, low.to(weight.dtype)))
    out = _mm_fp32(terms, weight)
    return out[: z.shape[0]] + out[z.shape[0] :] if precise else out


def _mm_fp32(a: Tensor, weight: Tensor) -> Tensor:
    """a [n, L] @ weight[N, L].T, both BF16, accumulated and returned in fp32."""
    if weight.is_cuda:
        return torch.mm(a, weight.t(), out_dtype=torch.float32)
    # BF16 GEMMs on CPU round their result, so the weights are widened instead, a block at a time.
    rows = max(1, PROJECTION_BLOCK_BYTES // (4 * weight.shape[1]))
    widened, out = a.float(), a.new_empty(a.shape[0], weight.shape[0], dtype=torch.float32)
    for first in range(0, weight.shape[0], rows):
        out[:, first : first + rows] = widened @ weight[first : first + rows].float().t()
    return out


def add_up(
    projected: Tensor, scale: float, bias: Tensor | None, shared: Tensor, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """scale * projected + bias + shared + residual in fp32, rounded once.

    Args:
        projected: [m, N], fp32; overwritten.
        bias: [N]. shared, residual: [m, N].
        dtype: of the result.

    Returns:
        [m, N] in `dtype`.
    """
    if scale != 1.0:
        projected *= scale
    if bias is not None:
        projected += bias
    projected += shared
    if residual is not None:
        projected += residual
    return projected.to(dtype)
