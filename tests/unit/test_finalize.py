"""The deferred finalize: a fused multiply-add a slot, in ascending k, and what it accepts."""

import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import k3comm
from k3comm.kernels.finalize import Deferred, finalize

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def fp32(exact: Fraction) -> Fraction:
    """Rounded once to fp32, ties to even; for sizes that are normal there."""
    if exact == 0:
        return exact
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit


def by_hand(rows: list[float], weights: list[float]) -> float:
    total = Fraction(0)
    for row, weight in zip(rows, weights, strict=True):
        total = fp32(total + Fraction(row) * Fraction(weight))
    return float(total)


def by_finalize(rows: list[float], weights: torch.Tensor) -> torch.Tensor:
    k = len(rows)
    given = Deferred(torch.tensor(rows)[:, None].to(BF16), weights, torch.arange(k, dtype=torch.int32), 1)
    given.check(1, BF16, CPU)
    return finalize(given, 1)[0, 0]


def test_a_sum_that_ends_on_a_tie_in_float64() -> None:
    """It needs 55 bits: rounding to float64 first makes a tie of it, and the fused result is lost."""
    rows, weights = [4096.0, 205 / 128, 4096.0], [4096.0, 5237765 / 2**23, -4096.0]
    assert by_hand(rows, weights) == 2.0
    assert by_finalize(rows, torch.tensor(weights)).item() == 2.0


numbers = st.integers(-(2**23), 2**23).map(lambda n: float(n) * 2.0**-12)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_each_slot_is_one_fused_multiply_add(slots: list[tuple[float, float]]) -> None:
    rows = [torch.tensor(row).to(BF16).item() for row, _ in slots]
    weights = torch.tensor([weight for _, weight in slots])
    expected = torch.tensor(by_hand(rows, [float(weight) for weight in weights])).to(BF16)
    assert by_finalize(rows, weights).item() == expected.item()


def test_special_values_go_through() -> None:
    nan, inf = float("nan"), float("inf")
    assert by_finalize([inf, 1.0], torch.tensor([1.0, 2.0])).item() == inf
    assert by_finalize([inf, -inf], torch.tensor([1.0, 1.0])).isnan()
    assert by_finalize([nan, 1.0], torch.tensor([1.0, 1.0])).isnan()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": [1]}, "rows: list given; accepted is a tensor"),
        ({"rows": torch.zeros(3, 1, dtype=BF16)}, "rows: shape (3, 1) given; accepted is [R, n] with n at least 2"),
        ({"rows": torch.zeros(3, 2)}, "rows: torch.float32 given; accepted is torch.bfloat16"),
        ({"weights": torch.zeros(4).half()}, "expert_weights: torch.float16 given; accepted are torch.bfloat16 and"),
        ({"weights": torch.zeros(3)}, "expert_weights: 3 given; accepted are 4, one a slot"),
        ({"permuted_index": torch.zeros(4, dtype=torch.int64)}, "permuted_index: torch.int64 given; accepted is torch"),
        ({"permuted_index": torch.zeros(1, 4, dtype=torch.int32)}, "permuted_index: shape (1, 4) given; accepted are"),
        ({"permuted_index": torch.full((4,), 3, dtype=torch.int32)}, "permuted_index: 3 given; accepted are -1 and"),
        ({"num_tokens": 3}, "permuted_index: 4 slots given; accepted are K for each of the 3 tokens"),
        ({"num_tokens": -1}, "num_tokens: -1 given; accepted are whole numbers from 0"),
    ],
)
def test_what_is_accepted(changes: dict, text: str) -> None:
    given = {
        "rows": torch.zeros(3, 2, dtype=BF16),
        "weights": torch.zeros(4),
        "permuted_index": torch.zeros(4, dtype=torch.int32),
        "num_tokens": 2,
    }
    Deferred(**given).check(2, BF16, CPU)
    with pytest.raises(k3comm.InputError, match=re.escape(text)):
        Deferred(**{**given, **changes}).check(2, BF16, CPU)
