"""What `doctor` finds out, as values: pure functions over facts and decisions, and the two collective checks.

The collective ones take an `Exchange`, whose collectives are bounded, and the memory to be tried as a
`SymmetricMemory`; a rank that fails in them says so in the next collective and never leaves before it.
"""

from __future__ import annotations

import json
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor

from k3comm.buffers.symmetric import Exchange, SymmetricMemory, describe, establish
from k3comm.facts import Facts, Unknown, Verdict
from k3comm.negotiate.ballot import word
from k3comm.negotiate.decide import COLUMNS, MAX_RANKS, Decision, name_ranks
from k3comm.operations import Proposal
from k3comm.tiers import UNLIMITED, Tier, plugins

PAIR_BYTES = 1 << 16
"""Bytes that a rank writes to each peer: more than one page and than a device's write buffers."""
VOTES = 21
"""Timed votes, after one that warms up."""
FACTS_BYTES = 1 << 15
"""Bytes of one rank's facts in the gather; values are cut until they fit."""
TEXT_BYTES = 256

_DRIVER = "the driver must be reachable in this process: see its line"
REMEDIES: Mapping[str, tuple[str, str]] = {
    "host_memory": ("no", "ranks of one host need memfd_create and each other's /proc: one user, one PID namespace"),
    "driver": ("no", "if there is a GPU: install the driver, or let the container have it (--gpus all)"),
    "device_uuid": ("no", _DRIVER),
    "pci_address": ("no", _DRIVER),
    "compute_capability": ("no", _DRIVER),
    "nvlinks": ("0", "look at `nvidia-smi nvlink -s`; without NVLink the tiers over peers stay off"),
    "fabric": ("no", "nvidia-fabricmanager must run on this host; look at `nvidia-smi -q`, section Fabric"),
    "fabric_handles": ("no", "across hosts only; start nvidia-imex on every host of the fabric"),
    "fabric_allocation": ("no", "across hosts only; start nvidia-imex, and let this user open its channel"),
    "multicast": ("no", "nvidia-fabricmanager must run, MIG be off, and no variable forbid it"),
    "mig": ("yes", "a MIG slice has no peers: `nvidia-smi -mig 0`, or leave it to the library tiers"),
    "operators": ("none", "install a CUDA build of torch 2.11 or newer"),
}
"""What may help where a fact is unknown, or is the text that stands first."""


# Facts as text


def plain(value: object) -> Any:
    """A fact as a value for `json.dumps`, whatever its type. An unknown is {"unknown": why}."""
    if isinstance(value, Unknown):
        return {"unknown": value.why}
    if isinstance(value, Enum):
        text = str(value)  # some say in words what they are
        return value.name if text in (str(value.value), f"{type(value).__name__}.{value.name}") else text
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((plain(one) for one in value), key=str)
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    kind: type[Any] = type(value)
    if attrs.has(kind):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(kind)}
    return str(value)


def facts_of(facts: Facts) -> dict[str, Any]:
    """Every fact by name, as `plain` values."""
    return {**{name: plain(getattr(facts, name)) for name in attrs.fields_dict(Facts)}, "family": facts.family}


def shown(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts for people: a line each; a table of facts becomes a line an entry, `versions.torch`.

    What a machine has no use for (None) is left out.
    """
    lines: dict[str, str] = {}
    for name, value in facts.items():
        if value is None:
            continue
        if isinstance(value, dict) and set(value) != {"unknown"}:
            if value:
                lines |= {f"{name}.{key}": text for key, text in shown(value).items()}
            else:
                lines[name] = "none"
        else:
            lines[name] = _text(name, value)
    return lines


def remedy(name: str, text: str) -> str:
    """What may help with a fact of that text; "" where nothing is wrong, or nothing is known to help."""
    bad, helps = REMEDIES.get(name.partition(".")[0], ("", ""))
    return helps if helps and (text == bad or text.startswith("unknown: ")) else ""


def _text(name: str, value: object) -> str:
    if isinstance(value, dict):
        return f"unknown: {value['unknown']}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("memory"):
        return f"{value / (1 << 30):.0f} GiB"
    if isinstance(value, list):
        return ", ".join(_text(name, one) for one in value) or "none"
    return str(value) or "none"


# What the tiers say


@attrs.frozen(kw_only=True)
class TierState:
    """One tier: what it can take, and why not.

    Attributes:
        capacity: rows that all ranks can take, 0 for a no.
        why_not: who says no and why; "" if nobody does.
        across_hosts: alone, the same across hosts: rows, and why not; None in a job, which knows where it is.
    """

    tier: Tier
    capacity: int
    why_not: str
    across_hosts: tuple[int, str] | None = None


def tiers_alone(facts: Facts, proposal: Proposal) -> tuple[TierState, ...]:
    """What a rank of such facts would say of every tier, before any vote."""
    present, found = plugins(), []
    for tier in Tier:
        here, across = word(tier, present.get(tier), facts, proposal)
        found.append(
            TierState(
                tier=tier,
                capacity=here.capacity,
                why_not=_why_not(here),
                across_hosts=(across.capacity, _why_not(across)),
            )
        )
    return tuple(found)


def tiers_agreed(decision: Decision) -> tuple[TierState, ...]:
    """What the ranks of a job have agreed on."""
    return tuple(
        TierState(tier=tier, capacity=decision.capacities.get(tier, 0), why_not=decision.refusal(tier)) for tier in Tier
    )


def shares_memory(decision: Decision) -> bool:
    """Whether an agreed tier works over memory that ranks share."""
    present = plugins()
    return any(present[tier].transports - {"library"} for tier in decision.capacities if tier in present)


def _why_not(verdict: Verdict) -> str:
    return "" if verdict else str(verdict)


# Pairs


@attrs.frozen(kw_only=True)
class Pair:
    """What came of one rank's access to another's block.

    Attributes:
        rank: who wrote or read. peer: whose block.
        kind: "write" (the peer found the bytes in its own block) or "read" (the rank found the peer's bytes).
        nbytes: how many were meant. right: how many were as they should be.
    """

    rank: int
    peer: int
    kind: str
    nbytes: int
    right: int

    @property
    def good(self) -> bool:
        """Whether every byte was right."""
        return self.right == self.nbytes

    def __str__(self) -> str:
        how = "writes to" if self.kind == "write" else "reads from"
        state = "ok" if self.good else "FAILED"
        return f"rank {self.rank} {how} rank {self.peer}: {state}, {self.right} of {self.nbytes} bytes right"


@attrs.frozen(kw_only=True)
class PairCheck:
    """All pairs, or why there are none; equal on every rank.

    Attributes:
        pairs: in the order of ranks. why_not: why memory could not be tried; then there are no pairs.
        failed: `why_not` is a failure, not just nothing to try. errors: what ranks ran into, with their names.
    """

    pairs: tuple[Pair, ...] = ()
    why_not: str = ""
    failed: bool = False
    errors: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a text each."""
        bad = tuple(str(pair) for pair in self.pairs if not pair.good)
        return ((self.why_not,) if self.failed else ()) + bad + self.errors


def check_pairs(memory: SymmetricMemory, exchange: Exchange, nbytes: int = PAIR_BYTES) -> PairCheck:
    """Every rank writes a pattern into every peer's block, and reads one there; all is compared. Collective.

    Args:
        memory: new; taken, and released, here.
        exchange: the group.
        nbytes: of each pattern.
    """
    rank, size = exchange.rank, exchange.size
    refusal = establish(memory, size * nbytes, exchange)
    if refusal is not None:
        return PairCheck(why_not=f"the memory could not be shared: {refusal}", failed=True)
    try:
        errors: list[str] = []

        def attempt(what: str, act: Callable[[], int]) -> int:
            try:
                return act()
            except Exception as error:  # a rank that leaves here would leave its peers at the next collective
                errors.append(f"rank {rank} {what}: {describe(error)}")
                return 0

        for peer in range(size):
            attempt(f"writes to rank {peer}", lambda peer=peer: _write(memory, rank, peer, nbytes))  # type: ignore[misc]
        exchange.min([0])  # all have written
        # Of every writer in this rank's block, then of every peer's own pattern in that peer's block.
        counts = [attempt("checks its block", lambda w=w: _right(memory, w, rank, nbytes)) for w in range(size)]  # type: ignore[misc]
        counts += [
            attempt(f"reads from rank {p}", lambda p=p: _right(memory, p, p, nbytes))  # type: ignore[misc]
            for p in range(size)
        ]
        text = "; ".join(errors).encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        said = exchange.gather(struct.pack(f"<{2 * size}q", *counts) + text)
    finally:
        memory.release()
    tables = [struct.unpack_from(f"<{2 * size}q", one) for one in said]
    texts = [one[16 * size :].rstrip(b"\0").decode(errors="ignore") for one in said]
    others = [(one, peer) for one in range(size) for peer in range(size) if peer != one]
    return PairCheck(
        pairs=(
            *(Pair(rank=a, peer=b, kind="write", nbytes=nbytes, right=tables[b][a]) for a, b in others),
            *(Pair(rank=a, peer=b, kind="read", nbytes=nbytes, right=tables[a][size + b]) for a, b in others),
        ),
        errors=tuple(text for text in texts if text),
    )


def pattern(writer: int, target: int, nbytes: int) -> Tensor:
    """What `writer` leaves in the block of `target`: uint8 [nbytes] on CPU, no zeros, unlike any other pair's."""
    generator = torch.Generator().manual_seed(1 + writer * MAX_RANKS + target)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def _write(memory: SymmetricMemory, writer: int, target: int, nbytes: int) -> int:
    place = memory.block(target)[writer * nbytes : (writer + 1) * nbytes]
    place.copy_(pattern(writer, target, nbytes))
    if place.is_cuda:
        torch.cuda.synchronize(place.device)
    return nbytes


def _right(memory: SymmetricMemory, writer: int, target: int, nbytes: int) -> int:
    place = memory.block(target)[writer * nbytes : (writer + 1) * nbytes]
    return int((place.cpu() == pattern(writer, target, nbytes)).sum())


# Votes and facts of all ranks


def timed_votes(exchange: Exchange, votes: int = VOTES) -> list[int]:
    """Microseconds of a vote as negotiate makes it, the median of each rank. Collective."""
    cells, times = [0] * (MAX_RANKS * COLUMNS), []
    for _ in range(votes + 1):
        start = time.perf_counter()
        exchange.min(cells)
        times.append(time.perf_counter() - start)
    mine = round(statistics.median(times[1:]) * 1e6)
    return [struct.unpack("<q", one)[0] for one in exchange.gather(struct.pack("<q", mine))]


def gather_facts(facts: Facts, exchange: Exchange) -> list[dict[str, Any]]:
    """Every rank's facts, in rank order. Collective."""
    return [json.loads(one) for one in exchange.gather(facts_text(facts_of(facts)))]


def facts_text(facts: Mapping[str, Any]) -> bytes:
    """FACTS_BYTES of JSON, texts cut until it fits."""
    for limit in (2000, 500, 100, 20):
        text = json.dumps({name: _cut(value, limit) for name, value in facts.items()}).encode()
        if len(text) <= FACTS_BYTES:
            return text.ljust(FACTS_BYTES, b" ")
    return json.dumps({"host": {"unknown": "the facts are too many to show"}}).encode().ljust(FACTS_BYTES, b" ")


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]}..."
    if isinstance(value, dict):
        return {key: _cut(one, limit) for key, one in value.items()}
    return [_cut(one, limit) for one in value] if isinstance(value, list) else value


# The whole


@attrs.frozen(kw_only=True)
class Checkup:
    """What `doctor` found; in a job the same on every rank.

    Attributes:
        ranks: in a job its size; alone, as many as were asked about. job: whether it is one.
        hosts: machines. settings: value and source by name.
        facts: of each rank, `plain` values. tiers: best first.
        windows: where they come from. notes: what is worth knowing and no fault.
        pairs, vote_us: in a job. required: tiers that were asked for.
        error: what ended the check before its end; "" if nothing did. absent: ranks that did not come at all.
    """

    ranks: int
    job: bool
    hosts: int = 1
    settings: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    facts: Sequence[Mapping[str, Any]] = ()
    tiers: Sequence[TierState] = ()
    windows: str = ""
    notes: Sequence[str] = ()
    pairs: PairCheck = attrs.field(factory=PairCheck)
    vote_us: Sequence[int] = ()
    required: Sequence[Tier] = ()
    error: str = ""
    absent: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The ranks that did not come, and the tiers that were asked for and are not to be had, with the reason."""
        found = {state.tier: state for state in self.tiers}
        return tuple(f"rank {rank} did not come" for rank in self.absent) + tuple(
            f"{tier.name} is required: {found[tier].why_not or 'not agreed'}"
            for tier in self.required
            if tier in found and not found[tier].capacity
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What does not work between the ranks."""
        return ((self.error,) if self.error else ()) + self.pairs.problems

    @property
    def exit_code(self) -> int:
        """0 all right; 1 a required tier is missing; 3 ranks disagree, a pair failed, or a rank is missing."""
        return 3 if self.failures else 1 if self.missing else 0

    def to_dict(self) -> dict[str, Any]:
        """For machines; the keys are documented in docs/doctor.md."""
        return {
            "schema": 1,
            "job": self.job,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "exit_code": self.exit_code,
            "failures": list(self.failures),
            "missing": list(self.missing),
            "absent_ranks": list(self.absent),
            "notes": list(self.notes),
            "settings": {name: dict(entry) for name, entry in self.settings.items()},
            "windows": self.windows,
            "tiers": {state.tier.name: _tier_entry(state) for state in self.tiers},
            "pairs": {
                "checked": bool(self.pairs.pairs),
                "why_not": self.pairs.why_not,
                "results": [{**attrs.asdict(pair), "ok": pair.good} for pair in self.pairs.pairs],
            },
            "vote_us": {"by_rank": list(self.vote_us), "slowest": max(self.vote_us, default=None)},
            "facts": [dict(one) for one in self.facts],
        }

    def facts_by_value(self) -> list[tuple[str, str, str]]:
        """Fact, value, and the ranks that have it: "" where all have."""
        lines = [shown(one) for one in self.facts]
        rows: list[tuple[str, str, str]] = []
        for name in dict.fromkeys(name for one in lines for name in one):
            ranks: dict[str, list[int]] = {}
            for rank, one in enumerate(lines):
                ranks.setdefault(one.get(name, "not asked"), []).append(rank)
            rows += [(name, text, name_ranks(who) if len(ranks) > 1 else "") for text, who in ranks.items()]
        return rows


def _tier_entry(state: TierState) -> dict[str, Any]:
    entry = {**_ability(state.capacity, state.why_not)}
    if state.across_hosts is not None:
        entry["across_hosts"] = _ability(*state.across_hosts)
    return entry


def _ability(capacity: int, why_not: str) -> dict[str, Any]:
    return {"can": bool(capacity), "rows": None if capacity in (0, UNLIMITED) else capacity, "why_not": why_not}
