"""Whether all ranks hold the same value, and where not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from k3comm.errors import InputError

T = TypeVar("T")

_SHOWN = 200  # characters of a value that a message shows


def assert_identical(values: Sequence[T], *, what: str = "outcome") -> T:
    """Assert that all ranks' values are the same.

    Types must be equal. Tensors and arrays must have equal dtype and shape and equal bits, so NaN equals NaN and -0.0
    differs from 0.0; strides, devices and gradients don't count. Floats follow suit, any NaN being equal to any other.
    Lists, tuples, mappings (in any order), attrs classes, dataclasses and exceptions are compared member by member,
    without the fields that their class leaves out of equality; all else by `==`.

    Args:
        values: one value a rank, in rank order, as `run_ranks` returns them.
        what: the name of the values in the message.

    Returns:
        The common value (rank 0's).

    Raises:
        AssertionError: names the ranks that differ from the largest group that agrees, and for each of them the first
            place that differs with both values there.
        InputError: no values.
    """
    __tracebackhide__ = True
    if not values:
        raise InputError("values: none given; one value a rank is accepted")
    groups: list[list[int]] = []
    for rank, value in enumerate(values):
        for group in groups:
            if _difference(values[group[0]], value) is None:
                group.append(rank)
                break
        else:
            groups.append([rank])
    if len(groups) > 1:
        common = max(groups, key=len)  # of equally large ones the one with the lowest rank
        lines = [f"{what} differs between ranks. Compared with {_name(common)},"]
        lines += [
            f"  {_name(group)}: {_difference(values[common[0]], values[group[0]])}"
            for group in groups
            if group is not common
        ]
        raise AssertionError("\n".join(lines))
    return values[0]


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _difference(right: Any, other: Any, path: str = "") -> str | None:
    """The first difference and its place, or None."""
    if type(right) is not type(other):
        return _told(path, f"{_short(other)} ({type(other).__name__})", f"{_short(right)} ({type(right).__name__})")
    if isinstance(right, torch.Tensor | np.ndarray | np.generic):
        return _bit_difference(right, other, path)
    if isinstance(right, Mapping) and not attrs.has(type(right)) and not dataclasses.is_dataclass(right):
        return _mapping_difference(right, other, path)
    members = _members(right)
    if members is None:
        return None if _equal(right, other) else _told(path, *_shorts(other, right))
    others = _members(other) or {}
    for label in [*members, *others]:
        if label not in others:
            return _told(path + label, "nothing", _short(members[label]))
        if label not in members:
            return _told(path + label, _short(others[label]), "nothing")
        if (found := _difference(members[label], others[label], path + label)) is not None:
            return found
    return None


def _mapping_difference(right: Mapping[Any, Any], other: Mapping[Any, Any], path: str) -> str | None:
    """Members are paired by their keys: two keys may look alike and differ, or be equal and of different types."""
    left = {key: (key, member) for key, member in other.items()}
    for key, member in right.items():
        place = f"{path}[{key!r}]"
        mate = left.get(key)
        if mate is None or _difference(key, mate[0]) is not None:
            # Keys that are the same and not equal: NaN, tensors. Of several the one whose member is the same, too.
            mates = [one for one in left.values() if _difference(key, one[0]) is None]
            mate = next((one for one in mates if _difference(member, one[1]) is None), mates[0] if mates else None)
        if mate is None:
            return _told(place, "nothing", _short(member))
        del left[mate[0]]
        if (found := _difference(member, mate[1], place)) is not None:
            return found
    for key, member in left.values():
        return _told(f"{path}[{key!r}]", _short(member), "nothing")
    return None


def _members(value: Any) -> dict[str, Any] | None:
    """What a value is made of, by how one would write the place; None for a value without parts."""
    if isinstance(value, type):
        return None
    if attrs.has(type(value)):
        return {f".{field.name}": getattr(value, field.name) for field in attrs.fields(type(value)) if field.eq}
    if dataclasses.is_dataclass(value):
        return {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, list | tuple):
        return {f"[{index}]": member for index, member in enumerate(value)}
    if isinstance(value, BaseException):
        return {".args": value.args}
    return None


def _equal(right: Any, other: Any) -> bool:
    if isinstance(right, float):
        same = right == other and math.copysign(1.0, right) == math.copysign(1.0, other)
        return same or (math.isnan(right) and math.isnan(other))
    return bool(right == other)


def _bit_difference(right: Any, other: Any, path: str) -> str | None:
    if (right.dtype, right.shape) != (other.dtype, other.shape):
        return _told(path, f"{other.dtype} {tuple(other.shape)}", f"{right.dtype} {tuple(right.shape)}")
    bits, other_bits = _bits(right), _bits(other)
    unequal = np.flatnonzero((bits != other_bits).any(axis=1))
    if not unequal.size:
        return None
    first = int(unequal[0])
    index = ", ".join(str(int(i)) for i in np.unravel_index(first, tuple(right.shape)))
    shown = [
        f"{value.reshape(-1)[first].item()!r} (0x{row[first].tobytes()[::-1].hex()})"
        for value, row in ((other, other_bits), (right, bits))
    ]
    return _told(f"{path}[{index}]", *shown) + f" ({unequal.size} of {len(bits)} elements differ)"


def _bits(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One row of bytes an element."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat.reshape(value.numel(), value.element_size())
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(value.size, value.itemsize)


def _told(path: str, got: str, expected: str) -> str:
    return f"{f'at {path} ' if path else ''}{got} instead of {expected}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _shorts(got: object, expected: object) -> tuple[str, str]:
    """Of long texts the part where they begin to differ."""
    if not (isinstance(got, str) and isinstance(expected, str)) or max(len(got), len(expected)) <= _SHOWN:
        return _short(got), _short(expected)
    pairs = enumerate(zip(got, expected, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    begin = max(0, start - _SHOWN // 4)
    cut = slice(begin, begin + _SHOWN)
    return f"...{got[cut]!r}... (from character {begin})", f"...{expected[cut]!r}..."
