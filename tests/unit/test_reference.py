"""The reference itself: its arithmetic by hand, its classes apart from one another, its yardstick honest."""

from __future__ import annotations

import hashlib
import inspect
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.kernels import reference
from k3comm.kernels.reference import (
    Accuracy,
    AccuracyMeter,
    Bound,
    Case,
    accept,
    bounds_for,
    integer_case,
    measure,
    model,
    moe_tail,
    random_case,
    rms_norm,
    round_once,
)
from k3comm.tiers.tier import Numerics

BF16 = torch.bfloat16
K0, K1, K2 = Numerics.K0, Numerics.K1, Numerics.K2
EVERY_MODEL = [(K0, False), (K0, True), (K1, False), (K2, False)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on a busy machine: threads that wait for one another cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype == BF16 else torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def one_element(routed: list[float], shared: list[float], **changes: Any) -> Case:
    """One token, one latent and one hidden column, W_up = 1, no norm; one entry a rank."""
    case = Case(
        routed=torch.tensor(routed, dtype=BF16).view(-1, 1, 1),
        shared=torch.tensor(shared, dtype=BF16).view(-1, 1, 1),
        up_weight=torch.ones(1, 1, dtype=BF16),
        residual=None,
        norm_weight=None,
        up_bias=None,
        routed_scale=1.0,
        eps=1e-5,
    )
    return attrs.evolve(case, **changes)


# The truth


def test_truth_by_hand() -> None:
    # The latent sum is (3, 4): mean square 12.5, with eps = 3.5 the norm divides by 4.
    routed = torch.tensor([[[1.0, 5.0]], [[2.0, -1.0]]])
    shared = torch.tensor([[[10.0, 20.0, 30.0]], [[1.0, 2.0, 3.0]]])
    up_weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    norm_weight = torch.tensor([8.0, 2.0])  # z = (6, 2)
    plain = moe_tail(routed, shared, up_weight, norm_weight=norm_weight, eps=3.5)
    assert plain.dtype == torch.float64
    assert plain.tolist() == [[17.0, 24.0, 41.0]]
    everything = moe_tail(
        routed,
        shared,
        up_weight,
        residual=torch.tensor([[0.25, 0.5, 0.75]]),
        norm_weight=norm_weight,
        eps=3.5,
        up_bias=torch.tensor([100.0, 200.0, 300.0]),
        routed_scale=0.5,
    )
    assert everything.tolist() == [[0.25 + 3 + 100 + 11, 0.5 + 1 + 200 + 22, 0.75 + 4 + 300 + 33]]


def test_no_norm_weight_is_no_norm() -> None:
    routed = torch.tensor([[[1.0, 5.0]], [[2.0, -1.0]]])
    shared = torch.zeros(2, 1, 1)
    out = moe_tail(routed, shared, torch.tensor([[10.0, 1.0]]), eps=3.5)
    assert out.tolist() == [[34.0]]
    ones = moe_tail(routed, shared, torch.tensor([[10.0, 1.0]]), norm_weight=torch.ones(2), eps=3.5)
    assert ones.tolist() == [[8.5]]


def test_truth_is_never_rounded() -> None:
    tiny = 2.0**-40
    case = one_element([1.0, tiny], [0.0, 0.0])
    assert case.truth().item() == 1.0 + tiny
    assert case.truth(torch.float32).item() == 1.0


def test_rms_norm_by_hand_and_per_row() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]], dtype=BF16)
    out = rms_norm(x, torch.tensor([8.0, 2.0]), 3.5)
    assert out[:2].tolist() == [[6.0, 2.0], [0.0, 0.0]]
    assert torch.allclose(out[2], torch.tensor([240.0, 80.0], dtype=torch.float64) / math.sqrt(1253.5), rtol=1e-15)
    assert rms_norm(x, torch.ones(2), 3.5, torch.float32).dtype == torch.float32


# The classes


@pytest.mark.parametrize("numerics", [K0, K1])
@pytest.mark.parametrize(
    ("values", "expected"),
    [((2.0**24, 1.0, -(2.0**24)), 0.0), ((1.0, 2.0**24, -(2.0**24)), 0.0), ((2.0**24, -(2.0**24), 1.0), 1.0)],
)
def test_sums_are_fp32_in_rank_order(numerics: Numerics, values: tuple[float, ...], expected: float) -> None:
    zeros = [0.0] * len(values)
    assert one_element(list(values), zeros).model(numerics).item() == expected
    assert one_element(zeros, list(values)).model(numerics).item() == expected
    assert one_element(list(values), list(values)).truth().item() == 2.0


def test_z_is_what_tells_k0_from_k1() -> None:
    # 257 needs nine bits: BF16 rounds it to 256, the pair is 256 + 1. The residual takes the large part away again.
    case = one_element([256.0, 1.0], [0.0, 0.0], residual=torch.tensor([[-256.0]], dtype=BF16))
    assert case.model(K0).item() == 1.0
    assert case.model(K0, pair=True).item() == 1.0
    assert case.model(K1).item() == 0.0


def test_k2_rounds_after_every_addition() -> None:
    # Each 1 is lost beside 256; together they are not.
    for case in (one_element([0.0] * 3, [256.0, 1.0, 1.0]), one_element([256.0, 1.0, 1.0], [0.0] * 3)):
        assert case.model(K2).item() == 256.0
        assert case.model(K1).item() == 258.0


@pytest.mark.parametrize("numerics", list(Numerics))
def test_additions_after_the_projection_are_rounded_once(numerics: Numerics) -> None:
    # 256 + 1 + 1 in BF16 steps stays 256.
    one = torch.tensor([[1.0]], dtype=BF16)
    assert one_element([256.0], [1.0], residual=one).model(numerics).item() == 258.0
    assert one_element([256.0], [1.0], up_bias=one[0]).model(numerics).item() == 258.0


def test_mean_square_is_of_the_sums_before_rounding() -> None:
    # Latent sums of 257, normed to 1. The mean square of BF16(257) = 256 would make it 257 / 256.
    routed = torch.tensor([256.0, 1.0], dtype=BF16).view(2, 1, 1).expand(2, 1, 4)
    shared = torch.zeros(2, 1, 1, dtype=BF16)
    weight = torch.full((1, 4), 64.0, dtype=BF16)
    out = model(K1, routed, shared, weight, norm_weight=torch.ones(4, dtype=BF16), eps=0.0)
    assert out.item() == 256.0


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
@pytest.mark.parametrize("norm", [True, False])
def test_bias_and_scale_are_applied_once_and_where_they_belong(numerics: Numerics, pair: bool, norm: bool) -> None:
    case = random_case(4, 8, 64, 256, dtype=BF16, seed=1, norm=norm, bias=True, routed_scale=2.5)
    assert case.up_bias is not None
    expected = round_once(case.truth(), BF16).double()
    close = case.model(numerics, pair=pair).double()
    assert (close - expected).abs().max() < 0.05
    # Leaving either out, or applying it twice, is far outside that.
    for wrong in (
        {"up_bias": None},
        {"up_bias": 4 * case.up_bias},
        {"routed_scale": 1.0},
        {"routed_scale": 6.25},
    ):
        assert (attrs.evolve(case, **wrong).model(numerics, pair=pair).double() - expected).abs().max() > 0.2


def test_float32_classes_are_one() -> None:
    case = random_case(4, 8, 64, 32, dtype=torch.float32, seed=2)
    first = case.model(K0)
    assert first.dtype == torch.float32
    assert same_bits(first, case.model(K1))
    assert same_bits(first, case.model(K2))


@pytest.fixture
def coarse_matmul() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_models_follow_no_global_switch(request: pytest.FixtureRequest) -> None:
    case = random_case(2, 16, 128, 256, dtype=BF16, seed=3)
    before = [case.model(numerics, pair=pair) for numerics, pair in EVERY_MODEL]
    request.getfixturevalue("coarse_matmul")
    assert torch.get_float32_matmul_precision() == "medium"
    after = [case.model(numerics, pair=pair) for numerics, pair in EVERY_MODEL]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))


def test_weights_that_require_gradients_leave_no_graph() -> None:
    case = random_case(2, 4, 16, 8, dtype=BF16, seed=3)
    case = attrs.evolve(case, up_weight=torch.nn.Parameter(case.up_weight))
    assert not case.truth().requires_grad
    assert not case.model(K0).requires_grad


def test_inputs_are_left_alone() -> None:
    for dtype in (BF16, torch.float32):
        case = random_case(3, 4, 16, 8, dtype=dtype, seed=3, bias=True)
        copies = [t.clone() for t in (case.routed, case.shared, case.residual) if t is not None]
        case.truth(torch.float32)
        for numerics in Numerics:
            case.model(numerics)
        assert all(
            same_bits(a, b)
            for a, b in zip(copies, [case.routed, case.shared, case.residual], strict=True)
            if b is not None
        )


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
def test_no_tokens(numerics: Numerics, pair: bool) -> None:
    case = random_case(2, 0, 16, 8, dtype=BF16, seed=0)
    assert case.truth().shape == (0, 16)
    assert case.model(numerics, pair=pair).shape == (0, 16)


# Special values


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
def test_negative_zero_partials_leave_the_residual(numerics: Numerics, pair: bool) -> None:
    case = random_case(4, 4, 32, 16, dtype=BF16, seed=4)
    assert case.residual is not None
    negative = attrs.evolve(case, routed=torch.full_like(case.routed, -0.0), shared=torch.full_like(case.shared, -0.0))
    assert same_bits(negative.model(numerics, pair=pair), case.residual)
    assert torch.equal(negative.truth(), case.residual.double())


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
def test_sums_keep_the_sign_of_zero(numerics: Numerics, pair: bool) -> None:
    # The projected +0 becomes -0 by the scale, so the result is -0 only if the shared sum is.
    for shared, expected in (([-0.0, -0.0], -0.0), ([-0.0, 0.0], 0.0)):
        out = one_element([0.0, 0.0], shared, routed_scale=-1.0).model(numerics, pair=pair)
        assert same_bits(out, torch.tensor([[expected]], dtype=BF16))


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
def test_subnormals_are_kept(numerics: Numerics, pair: bool) -> None:
    unit = 2.0**-133  # BF16's smallest
    for case in (one_element([0.0, 0.0], [5 * unit, -2 * unit]), one_element([5 * unit, -2 * unit], [0.0, 0.0])):
        assert case.model(numerics, pair=pair).double().item() == 3 * unit
        assert case.truth().item() == 3 * unit
        assert round_once(case.truth(), BF16).double().item() == 3 * unit


@pytest.mark.parametrize(("numerics", "pair"), EVERY_MODEL)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["routed", "shared", "residual"])
def test_a_bad_row_leaves_its_neighbours_their_bits(numerics: Numerics, pair: bool, poison: float, where: str) -> None:
    case = random_case(3, 6, 32, 16, dtype=BF16, seed=5)
    clean = case.model(numerics, pair=pair)
    tensor = getattr(case, where).clone()
    tensor[..., 2, 7] = poison
    poisoned = attrs.evolve(case, **{where: tensor})
    out = poisoned.model(numerics, pair=pair)
    others = [0, 1, 3, 4, 5]
    assert same_bits(out[others], clean[others])
    assert not out[2].isfinite().all()
    assert torch.equal(out.isfinite(), poisoned.truth().isfinite())


def test_an_infinite_pair_is_no_nan() -> None:
    assert one_element([math.inf, 0.0], [0.0, 0.0]).model(K0, pair=True).item() == math.inf


# Rounding


def test_round_once_is_right_beside_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    lower = torch.randint(0x0001, 0x7F7F, (4096,), generator=generator).to(torch.int16)
    upper = lower + 1
    low, high = lower.view(BF16).double(), upper.view(BF16).double()
    high = torch.where(high.isinf(), 2.0**128, high)
    middle = (low + high) / 2
    below, above = middle * (1 - 2.0**-45), middle * (1 + 2.0**-45)
    even = torch.where(lower % 2 == 0, lower, upper).view(BF16)
    for sign in (1.0, -1.0):
        assert torch.equal(round_once(sign * below, BF16), sign * lower.view(BF16))
        assert torch.equal(round_once(sign * above, BF16), sign * upper.view(BF16))
        assert torch.equal(round_once(sign * middle, BF16), sign * even)
    # Otherwise this test would not need to be here.
    assert not torch.equal(above.to(BF16), upper.view(BF16))


def test_round_once_special_values() -> None:
    x = torch.tensor([math.inf, -math.inf, 1e300, -1e300, -0.0, 2.0**-134, 2.0**-134 * 1.001, math.nan]).double()
    x[2:4] = torch.tensor([1e300, -1e300], dtype=torch.float64)
    out = round_once(x, BF16)
    expected = torch.tensor([math.inf, -math.inf, math.inf, -math.inf, -0.0, 0.0, 2.0**-133], dtype=BF16)
    assert same_bits(out[:7], expected)
    assert out[7].isnan()
    assert round_once(x, torch.float64) is x


# Accuracy


@pytest.fixture(scope="module")
def small() -> Case:
    return random_case(4, 256, 128, 64, dtype=BF16, seed=6)


def test_the_ideal_misrounds_nothing(small: Case) -> None:
    truth = small.truth()
    ideal = measure(round_once(truth, BF16), truth, small.residual)
    assert ideal.misrounded == 0.0
    assert ideal.paired_bias == 0.0
    assert ideal.error == ideal.ideal_error > 0.0
    assert ideal.rows == 256
    assert accept(K0, ideal, dtype=BF16) == []


def test_figures_by_hand() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 12.0]], dtype=torch.float64)
    twice = measure(2 * truth.float(), truth)
    assert attrs.astuple(twice) == (1.0, 0.75, 1.0, 1.0, 0.0, 2)
    # Contribution (0, 4 | 0, 3), difference (0, 0 | 0, -1): the residual's part is not the layer's.
    out = torch.tensor([[3.0, 4.0], [0.0, 11.0]])
    accuracy = measure(out, truth, torch.tensor([[3.0, 0.0], [0.0, 9.0]]))
    assert accuracy.error == pytest.approx(1 / 5)
    assert accuracy.misrounded == 0.25
    assert accuracy.bias == pytest.approx(-12 / 169)
    assert accuracy.paired_bias == accuracy.bias


def test_bias_of_the_format_is_not_in_the_paired_bias() -> None:
    truth = torch.tensor([[1.0 + 2.0**-9]], dtype=torch.float64)
    accuracy = measure(torch.ones(1, 1, dtype=BF16), truth)
    assert accuracy.bias < 0.0
    assert accuracy.paired_bias == 0.0


def test_misrounded_counts_elements(small: Case) -> None:
    truth = small.truth()
    out = round_once(truth, BF16)
    changed = torch.tensor([[0, 0], [17, 3], [255, 127]])
    bits(out)[changed[:, 0], changed[:, 1]] += 1
    assert measure(out, truth, small.residual).misrounded == 3 / out.numel()


def test_zeros_of_either_sign_are_right() -> None:
    truth = torch.zeros(1, 2, dtype=torch.float64)
    accuracy = measure(torch.tensor([[0.0, -0.0]]), truth)
    assert (accuracy.misrounded, accuracy.error, accuracy.bias) == (0.0, 0.0, 0.0)
    assert measure(torch.tensor([[0.0, 1.0]]), truth).error == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_should_be_finite_is_not_dropped(small: Case, bad: float) -> None:
    truth = small.truth()
    out = round_once(truth, BF16)
    out[9, 9] = bad
    accuracy = measure(out, truth, small.residual)
    assert not math.isfinite(accuracy.error)
    assert accuracy.misrounded == 1 / out.numel()
    assert len(accept(K0, accuracy, dtype=BF16)) >= 2
    good = measure(round_once(truth, BF16), truth, small.residual)
    assert accept(K1, accuracy, dtype=BF16, model=good) != []
    assert accept(K2, accuracy, dtype=BF16, model=good) != []
    single = measure(torch.tensor([[bad]]), torch.ones(1, 1, dtype=torch.float64))
    assert accept(K1, single, dtype=torch.float32) != []


def test_elements_that_are_not_finite_in_truth() -> None:
    truth = torch.tensor([[math.nan, math.inf, 1e300, 2.0]], dtype=torch.float64)
    right = measure(torch.tensor([[math.nan, math.inf, math.inf, 2.0]], dtype=BF16), truth)
    assert (right.error, right.misrounded, right.bias) == (0.0, 0.0, 0.0)
    wrong = measure(torch.tensor([[1.0, -math.inf, 3e38, 2.0]], dtype=BF16), truth)
    assert wrong.misrounded == 0.75
    # A NaN row, with a residual that brought it, beside clean rows.
    residual = torch.tensor([[math.nan], [1.0]], dtype=BF16)
    clean = measure(residual + 1, residual.double() + 1, residual)
    assert (clean.error, clean.misrounded, clean.rows) == (0.0, 0.0, 2)


def test_pooling_equals_one_shot(small: Case) -> None:
    truth, out, residual = small.truth(), small.model(K1), small.residual
    assert residual is not None
    once = measure(out, truth, residual)
    pooled, first, second = AccuracyMeter(), AccuracyMeter(), AccuracyMeter()
    for start, stop in ((0, 1), (1, 100), (100, 256)):
        rows = slice(start, stop)
        for meter in (pooled, first if start < 100 else second):
            meter.add(out[rows], truth[rows], residual[rows])
    second = pickle.loads(pickle.dumps(second))
    first.merge(second)
    for accuracy in (pooled.result(), first.result()):
        assert accuracy.rows == once.rows == 256
        assert accuracy.misrounded == once.misrounded > 0
        assert attrs.astuple(accuracy) == pytest.approx(attrs.astuple(once), rel=1e-9)
    assert second.result().rows == 156


def test_nothing_measured_is_nothing_accepted() -> None:
    accuracy = AccuracyMeter().result()
    assert accuracy.rows == 0
    assert math.isnan(accuracy.error)
    with pytest.raises(InputError, match="0 rows are too few"):
        accept(K0, accuracy, dtype=BF16)


def test_meter_refuses_what_it_cannot_compare() -> None:
    truth = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="must all be"):
        AccuracyMeter().add(torch.zeros(1, 4), truth)
    with pytest.raises(InputError, match="must all be"):
        AccuracyMeter().add(torch.zeros(2, 4), truth, torch.zeros(4))
    with pytest.raises(InputError, match="wider"):
        AccuracyMeter().add(torch.zeros(2, 4), truth.float())
    AccuracyMeter().add(torch.zeros(2, 4, dtype=BF16), truth.float())


# Acceptance


def figures(**changes: Any) -> Accuracy:
    good = Accuracy(error=2.13e-3, misrounded=1e-4, bias=-2e-6, paired_bias=1e-8, ideal_error=2.13e-3, rows=4096)
    return attrs.evolve(good, **changes)


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"misrounded": 0.0011}, ["misrounded"]),
        ({"misrounded": 0.001}, ["misrounded"]),
        ({"paired_bias": -2.1e-6}, ["paired_bias"]),
        ({"paired_bias": -2.1e-6, "rows": 15}, []),
        ({"error": 2.2e-3}, ["error_over_ideal"]),
        ({"misrounded": 0.5, "paired_bias": math.nan}, ["misrounded", "paired_bias"]),
    ],
)
def test_k0_bounds(changes: dict[str, float], broken: list[str]) -> None:
    lines = accept(K0, figures(**changes), dtype=BF16)
    assert [line.split()[0] for line in lines] == broken


def test_k0_pair_bounds() -> None:
    assert accept(K0, figures(misrounded=0.0029), dtype=BF16, pair=True) == []
    assert accept(K0, figures(misrounded=0.003), dtype=BF16, pair=True) == [
        "misrounded is 0.003, allowed is misrounded < 0.003 (absolute, BF16 pair)"
    ]


def test_k1_bounds() -> None:
    k1 = figures(misrounded=0.36, error=2.68e-3)
    assert accept(K1, k1, dtype=BF16, k3_like=True) == []
    worst = figures(misrounded=0.41, error=2.76e-3, paired_bias=6e-6)
    assert len(accept(K1, worst, dtype=BF16, k3_like=True)) == 3
    assert len(accept(K1, attrs.evolve(worst, rows=4095), dtype=BF16, k3_like=True)) == 2
    assert accept(K1, worst, dtype=BF16, model=figures(misrounded=0.40, error=2.70e-3)) == []
    assert len(accept(K1, worst, dtype=BF16, model=figures(misrounded=0.39, error=2.60e-3))) == 2
    with pytest.raises(InputError, match="plain model"):
        accept(K1, k1, dtype=BF16)


def test_k2_bounds() -> None:
    separate = figures(error=3.0e-3)
    assert accept(K2, figures(error=3.05e-3), dtype=BF16, separate_reduce=separate) == []
    assert accept(K2, figures(error=3.07e-3), dtype=BF16, separate_reduce=separate) == [
        "error is 0.00307, allowed is error <= 0.00306 (1.02 x SEPARATE_REDUCE)"
    ]
    assert accept(K2, figures(error=3.14e-3), dtype=BF16, model=separate) == []
    assert len(accept(K2, figures(error=3.16e-3), dtype=BF16, model=separate)) == 1
    with pytest.raises(InputError, match="SEPARATE_REDUCE or the class's plain model"):
        accept(K2, figures(), dtype=BF16)


def test_too_few_rows_are_refused_not_accepted() -> None:
    few = figures(rows=512)
    with pytest.raises(InputError, match="512 rows are too few to judge K2 here: pool 4096 or more"):
        accept(K2, few, dtype=BF16, separate_reduce=few)
    with pytest.raises(InputError, match="same data: 512 rows beside 4096"):
        accept(K2, figures(), dtype=BF16, separate_reduce=few)
    # A share of the rows may stand for the slow model.
    assert accept(K2, figures(), dtype=BF16, model=few) == []


def test_exact_data_meets_ratios_to_zero() -> None:
    exact = figures(error=0.0, misrounded=0.0, ideal_error=0.0, bias=0.0, paired_bias=0.0)
    assert accept(K0, exact, dtype=BF16) == []
    assert accept(K1, exact, dtype=BF16, model=exact) == []
    assert accept(K2, exact, dtype=BF16, separate_reduce=exact) == []
    assert accept(K0, attrs.evolve(exact, error=1e-9), dtype=BF16) != []


@pytest.mark.parametrize("numerics", list(Numerics))
def test_float32_bound(numerics: Numerics) -> None:
    assert accept(numerics, figures(error=4.9e-6, misrounded=0.9), dtype=torch.float32) == []
    assert len(accept(numerics, figures(error=5.1e-6), dtype=torch.float32)) == 1


def test_bounds_render_as_a_table() -> None:
    accuracy = figures(rows=8, paired_bias=-3e-6)
    rows = [
        (str(bound), f"{bound.value(accuracy):.3g}", bound.applies(accuracy), bound.holds(accuracy))
        for bound in bounds_for(K0, dtype=BF16)
    ]
    assert rows == [
        ("misrounded < 0.001", "0.0001", True, True),
        ("|paired_bias| < 2e-06", "3e-06", False, False),
        ("error_over_ideal <= 1.01", "1", True, True),
    ]


def test_nan_is_never_within_a_bound() -> None:
    for inclusive in (False, True):
        bound = Bound(quantity="bias", limit=math.inf, inclusive=inclusive, source="here")
        assert not bound.holds(figures(bias=math.nan))
        assert bound.holds(figures(bias=-1.0))


@pytest.mark.parametrize(
    "arguments",
    [
        {"numerics": K0, "dtype": torch.float16},
        {"numerics": K1, "dtype": BF16, "k3_like": True, "pair": True},
        {"numerics": K0, "dtype": torch.float32, "pair": True},
    ],
)
def test_bounds_that_do_not_exist(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        bounds_for(**arguments)


# The classes against their acceptance


@pytest.fixture(scope="module")
def k3() -> tuple[Case, Tensor]:
    # A quarter of the columns, whose number plays no part, and K3's latent width, which does.
    case = random_case(8, 64, 1792, 3584, dtype=BF16, seed=7)
    return case, case.truth()


def test_models_keep_their_classes(k3: tuple[Case, Tensor]) -> None:
    case, truth = k3
    accuracies = {}
    for numerics, pair in EVERY_MODEL:
        accuracy = measure(case.model(numerics, pair=pair), truth, case.residual)
        accuracies[numerics, pair] = accuracy
        assert accept(numerics, accuracy, dtype=BF16, pair=pair, k3_like=True, model=accuracy) == []
    # The table of the module's docstring, as far as so few rows can show it.
    assert accuracies[K0, False].error == pytest.approx(2.13e-3, rel=0.02)
    assert 0.0 < accuracies[K0, False].misrounded < 3e-4
    assert accuracies[K0, True].misrounded == pytest.approx(1.9e-3, rel=0.15)
    assert accuracies[K1, False].error == pytest.approx(2.67e-3, rel=0.02)
    assert accuracies[K1, False].misrounded == pytest.approx(0.362, rel=0.02)
    assert accuracies[K2, False].error == pytest.approx(4.55e-3, rel=0.02)
    assert accuracies[K2, False].misrounded == pytest.approx(0.582, rel=0.02)
    # And no class passes for the one above it.
    assert accept(K0, accuracies[K0, True], dtype=BF16) != []
    assert len(accept(K0, accuracies[K1, False], dtype=BF16, pair=True)) >= 2
    assert len(accept(K1, accuracies[K2, False], dtype=BF16, k3_like=True)) == 2


def test_plain_operators_belong_to_the_classes_that_they_should(k3: tuple[Case, Tensor]) -> None:
    """The K1 tail as an engine would write it is K1; with its sums rounded once it is K2 and better than the ring."""
    case, truth = k3
    assert case.norm_weight is not None
    assert case.residual is not None
    summed = case.routed.float().sum(0)
    z = torch.nn.functional.rms_norm(summed, (3584,), case.norm_weight.float(), case.eps).to(BF16)
    k1 = z.float() @ case.up_weight.float().T + case.shared.float().sum(0) + case.residual.float()
    assert accept(K1, measure(k1.to(BF16), truth, case.residual), dtype=BF16, k3_like=True) == []
    z = torch.nn.functional.rms_norm(summed.to(BF16).float(), (3584,), case.norm_weight.float(), case.eps).to(BF16)
    k2 = z.float() @ case.up_weight.float().T + case.shared.sum(0).float() + case.residual.float()
    accuracy = measure(k2.to(BF16), truth, case.residual)
    ring = measure(case.model(K2), truth, case.residual)
    assert accept(K2, accuracy, dtype=BF16, model=ring) == []
    assert len(accept(K1, accuracy, dtype=BF16, k3_like=True)) == 2
    assert accuracy.error == pytest.approx(3.15e-3, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{"residual_sigma": 8.0}, {"residual_sigma": None}, {"norm": False}, {"bias": True}]
)
def test_k0_bounds_hold_on_other_data(changes: dict[str, Any]) -> None:
    case = random_case(8, 512, 256, 128, dtype=BF16, seed=8, **changes)
    truth = case.truth()
    for pair in (False, True):
        accuracy = measure(case.model(K0, pair=pair), truth, case.residual)
        assert accept(K0, accuracy, dtype=BF16, pair=pair) == []
    assert accept(K0, measure(case.model(K1), truth, case.residual), dtype=BF16) != []


def test_float32_bound_admits_fp32_and_refuses_tf32() -> None:
    case = random_case(8, 32, 256, 1024, dtype=torch.float32, seed=9)
    truth = case.truth()
    assert case.norm_weight is not None
    assert case.residual is not None
    z = torch.nn.functional.rms_norm(case.routed.sum(0), (1024,), case.norm_weight, case.eps)

    def finished(projected: Tensor) -> Accuracy:
        assert case.residual is not None
        return measure(projected + case.shared.sum(0) + case.residual, truth, case.residual)

    sequential = torch.zeros(32, 256)
    for column in range(1024):
        sequential = sequential + z[:, column, None] * case.up_weight[:, column]
    tf32 = [((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (z, case.up_weight)]
    assert accept(K0, measure(case.model(K0), truth, case.residual), dtype=torch.float32) == []
    assert accept(K2, finished(z @ case.up_weight.T), dtype=torch.float32) == []
    assert accept(K2, finished(sequential), dtype=torch.float32) == []
    assert len(accept(K2, finished(tf32[0] @ tf32[1].T), dtype=torch.float32)) == 1


# The data


def digest(case: Case) -> str:
    value = hashlib.sha256()
    for tensor in (case.routed, case.shared, case.up_weight, case.residual, case.norm_weight, case.up_bias):
        if tensor is not None:
            value.update(bits(tensor).numpy().tobytes())
    return value.hexdigest()


def test_data_is_the_same_in_every_process() -> None:
    here = [
        digest(random_case(3, 70, 96, 80, dtype=BF16, seed=11, bias=True)),
        digest(integer_case(3, 70, 96, 80, dtype=BF16, seed=11, bias=True)),
    ]
    code = f"""
from __future__ import annotations
import hashlib, torch
from k3comm.kernels.reference import integer_case, random_case
{inspect.getsource(bits)}
{inspect.getsource(digest)}
torch.set_num_threads(2); torch.manual_seed(99); torch.set_default_dtype(torch.float64)
BF16 = torch.bfloat16
for make in (random_case, integer_case):
    print(digest(make(3, 70, 96, 80, dtype=BF16, seed=11, bias=True)))
"""
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(reference.__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert there.stdout.split() == here


def test_data_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):  # nor is the data anywhere but on the CPU
        cases = random_case(2, 4, 16, 8, dtype=BF16, seed=1), integer_case(2, 4, 16, 8, dtype=BF16, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert {case.routed.device.type for case in cases} == {case.up_weight.device.type for case in cases} == {"cpu"}


def test_seeds_and_ranks_differ() -> None:
    one, other = (random_case(4, 8, 32, 16, dtype=BF16, seed=seed) for seed in (1, 2))
    assert not torch.equal(one.routed, other.routed)
    assert not torch.equal(one.up_weight, other.up_weight)
    assert len({tuple(partial.flatten().tolist()) for partial in one.routed}) == 4
    fewer = random_case(2, 8, 32, 16, dtype=BF16, seed=1)
    assert same_bits(fewer.routed, one.routed[:2])


def test_distribution() -> None:
    case = random_case(4, 64, 256, 128, dtype=BF16, seed=3, bias=True, residual_sigma=8.0)
    assert case.residual is not None
    assert case.norm_weight is not None
    assert case.up_bias is not None
    assert case.dtype == BF16
    for tensor, sigma in ((case.routed, 0.1), (case.shared, 0.1), (case.up_weight, 0.02), (case.residual, 8.0)):
        assert tensor.double().std().item() == pytest.approx(sigma, rel=0.03)
        assert abs(tensor.double().mean().item()) < 0.03 * sigma
    assert case.norm_weight.double().mean().item() == pytest.approx(1.0, abs=0.03)
    assert case.up_bias.double().std().item() == pytest.approx(0.1, rel=0.2)


def test_a_layer_taken_over() -> None:
    layer = random_case(4, 8, 32, 16, dtype=BF16, seed=1)
    other = random_case(4, 3, 32, 16, dtype=BF16, seed=2, layer=layer)
    assert random_case(4, 3, 32, 16, dtype=BF16, seed=2, layer=layer.to("meta")).routed.device.type == "meta"
    assert other.up_weight is layer.up_weight
    assert same_bits(other.routed, random_case(4, 3, 32, 16, dtype=BF16, seed=2).routed)
    with pytest.raises(InputError, match="taken over"):
        random_case(4, 3, 32, 16, dtype=BF16, seed=2, layer=layer, norm=False)
    with pytest.raises(InputError, match="taken over"):
        random_case(4, 3, 32, 16, dtype=BF16, seed=2, layer=layer, routed_scale=2.0)


def test_to_moves_every_tensor() -> None:
    case = random_case(2, 4, 16, 8, dtype=BF16, seed=1, bias=True)
    moved = case.to("meta")
    tensors = [value for value in attrs.astuple(moved, recurse=False) if isinstance(value, Tensor)]
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("routed_scale", "bias"), [(1.0, False), (0.5, True), (2.0, True)])
def test_integers_are_exact_in_any_class_and_order(
    world_size: int, norm: bool, routed_scale: float, bias: bool
) -> None:
    case = integer_case(
        world_size, 12, 96, 256, dtype=BF16, seed=world_size, norm=norm, routed_scale=routed_scale, bias=bias, eps=5e-3
    )
    truth = case.truth()
    expected = round_once(truth, BF16)
    assert (expected.double() % 2 == 1).all()
    assert expected.abs().max() <= 256
    for numerics, pair in EVERY_MODEL:
        assert same_bits(case.model(numerics, pair=pair), expected)
        order = torch.randperm(world_size, generator=torch.Generator().manual_seed(1))
        shuffled = attrs.evolve(case, routed=case.routed[order], shared=case.shared[order])
        assert same_bits(shuffled.model(numerics, pair=pair), expected)
    # No grouping of ranks comes to more than BF16 holds exactly.
    for partials in (case.routed, case.shared):
        assert torch.equal(partials.double(), partials.double().round())
        assert partials.double().abs().sum(0).max() <= 256
    exact = case.routed.double().sum(0)
    pieces = list(case.routed)
    while len(pieces) > 1:
        pieces = [*(a + b for a, b in zip(pieces[::2], pieces[1::2], strict=False)), *pieces[len(pieces) & ~1 :]]
    assert torch.equal(pieces[0].double(), exact)


def test_integers_in_float32_are_exact_without_norm() -> None:
    case = integer_case(4, 12, 96, 256, dtype=torch.float32, seed=1, norm=False)
    for numerics in Numerics:
        assert torch.equal(case.model(numerics).double(), case.truth())


def test_every_part_of_the_integers_counts() -> None:
    case = integer_case(4, 12, 96, 256, dtype=BF16, seed=3, bias=True)
    assert case.residual is not None
    assert case.up_bias is not None
    expected = case.model(K1)

    def changed_rows(**changes: Any) -> int:
        return int((attrs.evolve(case, **changes).model(K1) != expected).any(1).sum())

    for rank in range(4):
        for name in ("routed", "shared"):
            without = getattr(case, name).clone()
            without[rank] = 0
            assert changed_rows(**{name: without}) == 12
    for column in range(256):
        without = case.routed.clone()
        without[..., column] *= -1
        assert changed_rows(routed=without) == 12
    assert (case.up_weight != 0).any(1).all()
    assert changed_rows(residual=None) == 12
    assert changed_rows(up_bias=None) == 12
    assert len(set(case.routed.double().sum(0).abs()[:, 0].tolist())) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 33},
        {"latent": 37 * 16},
        {"routed_scale": 1.5},
        {"eps": 1e-2},
        {"eps": -1e-5},
        {"dtype": torch.float16},
        {"num_tokens": -1},
        {"world_size": 0},
    ],
)
def test_integers_out_of_range(changes: dict[str, Any]) -> None:
    good: dict[str, Any] = {"world_size": 2, "num_tokens": 4, "hidden": 16, "latent": 8, "dtype": BF16, "seed": 0}
    assert integer_case(**good).truth().shape == (4, 16)
    with pytest.raises(InputError):
        integer_case(**good | changes)


# Wrong arguments


@pytest.mark.parametrize("name", ["routed", "shared", "up_weight", "residual", "norm_weight", "up_bias"])
def test_shapes_that_do_not_belong_together(name: str) -> None:
    case = random_case(2, 4, 16, 8, dtype=BF16, seed=0, bias=True)
    wrong = attrs.evolve(case, **{name: getattr(case, name)[:1]})
    calls: tuple[Callable[[], Tensor], ...] = (wrong.truth, lambda: wrong.model(K0))
    for call in calls:
        with pytest.raises(InputError, match=name):
            call()


def test_dtypes_that_are_not_served() -> None:
    case = random_case(2, 4, 16, 8, dtype=BF16, seed=0)
    with pytest.raises(InputError, match="float16"):
        attrs.evolve(case, routed=case.routed.half(), shared=case.shared.half()).model(K0)
    with pytest.raises(InputError, match="bfloat16"):
        case.truth(BF16)
    with pytest.raises(InputError, match="pair"):
        case.model(K1, pair=True)
    with pytest.raises(InputError, match="float16"):
        random_case(2, 4, 16, 8, dtype=torch.float16, seed=0)


def test_exports_exist() -> None:
    assert len(reference.__all__) == len(set(reference.__all__))
    assert all(hasattr(reference, name) for name in reference.__all__)
