"""The tiers of the MoE tail, best first, and the accuracy classes that they belong to."""

from __future__ import annotations

from enum import Enum, IntEnum, unique


@unique
class Tier(IntEnum):
    """How one MoE tail can be finished. The order is the priority: a smaller value is preferred.

    Only the order counts; the gaps are there so that a new member is one line.
    """

    MNNVL_CUTEDSL = 10
    TAIL_FUSION = 20
    MULTIMEM_AR = 30
    PEER_AR = 40
    SEQUENCE_PARALLEL = 50
    COLUMN_PARALLEL = 60
    FUSED_LANE_AR = 70
    SEPARATE_REDUCE = 80


@unique
class Numerics(Enum):
    """Accuracy classes, most accurate first (docs/tiers.md, "Numerics classes").

    K0: fp32 sums in rank order, z in fp32 (or a BF16 pair) for the projection, one rounding.
    K1: the same sums, z rounded to BF16 for the projection, one rounding at the end.
    K2: a library's BF16 all-reduce, rounded in its own order, z in BF16, fp32 afterwards.
    """

    K0 = "K0"
    K1 = "K1"
    K2 = "K2"
