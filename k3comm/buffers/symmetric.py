"""What a tier asks of the memory that ranks share."""

from __future__ import annotations

from enum import Enum, unique

import attrs


@unique
class Block(Enum):
    """The two blocks a communicator allocates: each is one vote, so running out of one costs only its own tiers."""

    DECODE = "decode"
    STAGING = "staging"


@attrs.frozen(kw_only=True)
class BufferRequest:
    """Bytes in one block, laid out at the same offset on every rank.

    Attributes:
        block: which block.
        nbytes: size in bytes.
        alignment: of the offset, in bytes; a power of two.
    """

    block: Block
    nbytes: int
    alignment: int = 16
