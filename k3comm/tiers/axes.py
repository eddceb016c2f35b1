"""What a choice depends on: numbers that are the same on every rank by construction."""

from __future__ import annotations

from typing import Any

import attrs

from k3comm.errors import InputError


def _count(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not int or value < 0:
        raise InputError(f"num_tokens: {value!r} given; accepted are whole numbers from 0")


def boolean(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A validator: True or False, nothing that only looks like it."""
    if type(value) is not bool:
        raise InputError(f"{attribute.name}: {value!r} given; accepted are True and False")


@attrs.frozen(kw_only=True)
class Axes:
    """The rank-uniform axes of one selection.

    Attributes:
        num_tokens: rows m of the forward, at least 0; equal on all ranks.
        graph: the forward is captured into, or replayed from, a CUDA graph.
        decode: every row is a decode or draft-verify row (a mixed batch is not).
    """

    num_tokens: int = attrs.field(validator=_count)
    graph: bool = attrs.field(default=False, validator=boolean)
    decode: bool = attrs.field(default=False, validator=boolean)
