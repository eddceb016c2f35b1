"""Byte ranges: exact bounding boxes, half-open, by device."""

from __future__ import annotations

import itertools

import pytest
import torch

from k3comm.buffers.alias import byte_range, check_no_alias, overlaps
from k3comm.errors import InputError

BASE = torch.zeros(64, dtype=torch.bfloat16)


def touched(tensor: torch.Tensor) -> set[int]:
    """Every address of every element, one by one."""
    size = tensor.element_size()
    return {
        tensor.data_ptr() + size * sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True)) + byte
        for index in itertools.product(*map(range, tensor.shape))
        for byte in range(size)
    }


VIEWS = {
    "whole": BASE,
    "scalar": BASE[3],
    "row": BASE.view(8, 8)[2],
    "column": BASE.view(8, 8)[:, 1],
    "transposed": BASE.view(8, 8).t(),
    "odd offset": BASE[1:4],
    "expanded": BASE[5:6].expand(9),
    "overlapping as_strided": BASE.as_strided((4, 6), (2, 1), 7),
    "other dtype": BASE[8:16].view(torch.float32),
    "bytes": BASE.view(torch.uint8)[3:6],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_range_is_the_bounding_box(name: str) -> None:
    addresses = touched(VIEWS[name])
    assert byte_range(VIEWS[name]) == (min(addresses), max(addresses) + 1)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_what_is_empty_has_no_range_and_overlaps_nothing(shape: tuple[int, ...]) -> None:
    empty = BASE.as_strided(shape, tuple(1 for _ in shape), 3)
    assert byte_range(empty) is None
    assert not overlaps(empty, BASE)
    assert not overlaps(BASE, empty)


def test_touching_is_not_overlapping() -> None:
    assert not overlaps(BASE[:8], BASE[8:])
    assert not overlaps(BASE[8:], BASE[:8])
    assert overlaps(BASE[:9], BASE[8:])
    assert overlaps(BASE[8:], BASE[:9])
    assert overlaps(BASE[4:5], BASE)
    # One byte is enough, whatever the dtypes.
    assert overlaps(BASE.view(torch.uint8)[17:18], BASE[8:9])
    assert not overlaps(BASE.view(torch.uint8)[15:16], BASE[8:9])


def test_a_storage_is_not_a_range() -> None:
    assert BASE[:8].untyped_storage().data_ptr() == BASE[40:].untyped_storage().data_ptr()
    assert not overlaps(BASE[:8], BASE[40:])


def test_interleaved_columns_count_as_overlapping() -> None:
    matrix = BASE.view(8, 8)
    assert not touched(matrix[:, :4]) & touched(matrix[:, 4:])
    assert overlaps(matrix[:, :4], matrix[:, 4:])


def test_no_pair_that_shares_a_byte_is_missed() -> None:
    for one, other in itertools.product(VIEWS.values(), repeat=2):
        if touched(one) & touched(other):
            assert overlaps(one, other)
        assert overlaps(one, other) == overlaps(other, one)


def test_devices_are_apart() -> None:
    here, nowhere = torch.zeros(4), torch.zeros(4, device="meta")
    assert byte_range(nowhere) == (0, 16)
    assert not overlaps(here, nowhere)
    assert not overlaps(nowhere, here)


def test_the_error_names_both() -> None:
    a, b = BASE[:16], BASE[15:20]
    with pytest.raises(InputError, match=r"^out: it overlaps residual \(bytes 0x[0-9a-f]+ to 0x[0-9a-f]+ and bytes "):
        check_no_alias({"out": a, "normed": None}, {"routed": BASE[30:], "residual": b})
    with pytest.raises(InputError, match=r"^out: it overlaps normed "):
        check_no_alias({"out": a, "normed": b}, {"routed": BASE[30:]})


def test_what_is_apart_passes() -> None:
    check_no_alias(
        {"out": BASE[:8], "normed": BASE[8:16]}, {"routed": BASE[16:], "shared": BASE[16:], "residual": None}
    )
    check_no_alias({}, {"routed": BASE})
    check_no_alias({"out": BASE}, {})
