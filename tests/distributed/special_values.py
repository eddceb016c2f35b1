"""Special values in the partial sums of a few rows, for the tests of tiers on GPUs."""

import torch

from k3comm.kernels import reference


def put_special_values(case: reference.Case, rank: int, right: torch.Tensor) -> torch.Tensor:
    """Puts a NaN into a routed row and an infinity into a shared one, of a rank's partial sums; what is right then.

    The projection spreads the NaN over its whole row. The infinity stays in its column, and no other row changes.

    Args:
        case: of 8 rows or more; written to. right: its result without them.
    """
    case.routed[rank][5, 1] = float("nan")
    case.shared[rank][7, 3] = float("inf")
    right = right.clone()
    right[5], right[7, 3] = float("nan"), float("inf")
    return right
