"""Whether tensors share bytes: exact byte ranges, never whole storages.

A range is the strided bounding box of what a tensor can touch: columns 0..3 and 4..7 of one matrix overlap by it, as
their rows interleave, though no byte is in both. It refuses a little too much and never too little, at a cost that does
not depend on the size. Ranges are half-open, so neighbours in one buffer touch without overlapping.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from k3comm.errors import InputError


def byte_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses [start, end) that a tensor of any shape and strides can touch; None if it has no elements."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return None
        last += (size - 1) * stride
    start = tensor.data_ptr()
    return start, start + tensor.element_size() * (1 + last)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges of two tensors share an address. Those of different devices never do."""
    if a.device != b.device:
        return False
    one, other = byte_range(a), byte_range(b)
    return one is not None and other is not None and one[0] < other[1] and other[0] < one[1]


def check_no_alias(outputs: Mapping[str, torch.Tensor | None], inputs: Mapping[str, torch.Tensor | None]) -> None:
    """Refuses outputs that lie over an input or over each other; None entries are skipped.

    Raises:
        InputError: names the two arguments and their byte ranges.
    """
    written = [(name, tensor) for name, tensor in outputs.items() if tensor is not None]
    read = [(name, tensor) for name, tensor in inputs.items() if tensor is not None]
    for place, (name, tensor) in enumerate(written):
        for other_name, other in (*read, *written[place + 1 :]):
            if overlaps(tensor, other):
                raise InputError(
                    f"{name}: it overlaps {other_name} ({_text(tensor)} and {_text(other)}); "
                    "accepted is memory of its own"
                )


def _text(tensor: torch.Tensor) -> str:
    start, end = byte_range(tensor) or (0, 0)
    return f"bytes {start:#x} to {end:#x}"
