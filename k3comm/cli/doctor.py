"""What this machine can do, and whether the ranks of a job can do it together.

Alone: this machine's facts, and what every tier lacks here, also those that would not be chosen. On the ranks of a job

    torchrun --standalone --nproc-per-node 4 -m k3comm doctor

what all ranks agree on and who says no to what; a pattern written into every peer's shared memory, and read there, pair
by pair, over the memory that was agreed; and the time of a vote. Rank 0 speaks. Every wait has a deadline.

Exit codes: 0 all is well; 1 a tier that --require names is not to be had; 2 a wrong argument, variable or file; 3 the
ranks disagree, a pair failed, or a rank is missing.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from k3comm.cli import _choice, _console
from k3comm.errors import InputError, K3CommError
from k3comm.negotiate.decide import MAX_RANKS, Decision, name_ranks, printable
from k3comm.negotiate.report import not_run
from k3comm.settings import MAX_SECONDS, Settings, launched, meeting_place, quiet_torch
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import UNLIMITED, Tier, Windows, choose_windows, load_windows

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from k3comm.buffers.symmetric import Exchange, SymmetricMemory
    from k3comm.cli._checkup import Checkup, PairCheck, TierState
    from k3comm.facts import Facts
    from k3comm.negotiate.exchange import GroupExchange

HELP = "this machine's facts and what each tier lacks; under torchrun, whether the ranks can do it together"

RANKS = 8
DEADLINE = 30.0
GRACE = 1.0
"""Seconds that a rank that gives up leaves rank 0 to speak: a launcher ends all ranks after the first."""
SPEC = LatentMoESpec.kimi_k3()
FRAMES = re.compile(r"\s*(Exception raised from |frame #[0-9])")
"""How the lines begin in which torch's errors name their places in C++."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    parser.epilog = (
        "examples:\n  k3comm doctor --require TAIL_FUSION\n  torchrun --nproc-per-node 8 -m k3comm doctor --json\n"
    )
    parser.add_argument(
        "--ranks",
        type=_choice.whole(1, MAX_RANKS),
        default=RANKS,
        metavar="N",
        help="alone: the number of ranks that the tiers are asked about (default: %(default)s)",
    )
    parser.add_argument(
        "--require",
        type=_tier,
        action="append",
        default=[],
        metavar="TIER",
        help="exit with 1 if this tier is not to be had; may be given again (default: none)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose tensors the tiers are asked about; auto is cuda where torch finds a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=_seconds,
        default=DEADLINE,
        metavar="S",
        help="in a job: seconds that each wait for the other ranks may take (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead; see docs/doctor.md")


def run(arguments: argparse.Namespace) -> int:
    """Looks, alone or with the other ranks of the job, and shows what was found."""
    job = launched()
    if job is None:
        found = _alone(arguments)
        _show(found, arguments.json)
        return found.exit_code
    rank, size, local = job
    if size > MAX_RANKS:
        raise InputError(f"WORLD_SIZE: {size} given; accepted are 1 to {MAX_RANKS} ranks")
    return _in_a_job(arguments, rank, size, local)


def _alone(arguments: argparse.Namespace) -> Checkup:
    import torch

    from k3comm.cli._checkup import Checkup, facts_of, tiers_alone
    from k3comm.negotiate.probe import probe
    from k3comm.operations import Proposal

    settings = Settings.from_env()
    device = _device(arguments.device)
    facts = probe(
        torch.device(device),
        world_size=arguments.ranks,
        backend="nccl" if device == "cuda" else "gloo",
        host_identity=settings.host_identity,
    )
    windows, notes = _windows(facts, settings, arguments.ranks)
    proposal = Proposal(
        spec=SPEC,
        layout=ParallelLayout(tp=arguments.ranks),
        settings=settings,
        world_size=arguments.ranks,
        device=device,
        windows=windows,
    )
    return Checkup(
        ranks=arguments.ranks,
        job=False,
        settings=_settings(settings),
        facts=[facts_of(facts)],
        tiers=tiers_alone(facts, proposal),
        windows=f"{windows.source} ({windows.family})",
        notes=[*notes, *not_run(device)],
        required=tuple(arguments.require),
    )


def _in_a_job(arguments: argparse.Namespace, rank: int, size: int, local: int) -> int:
    quiet_torch()
    import torch
    import torch.distributed as dist

    from k3comm.negotiate.exchange import GroupExchange

    place = meeting_place()
    device = _device(arguments.device)
    if device == "cuda":
        torch.cuda.set_device(local % max(torch.cuda.device_count(), 1))
    absent: tuple[int, ...] = ()
    try:
        store, absent = _meet(place, rank, size, arguments.deadline)
        if absent:
            raise RuntimeError(f"{name_ranks(absent)} did not come")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=arguments.deadline),
        )
    except (RuntimeError, ValueError) as error:
        why = f"not all {size} ranks came together within {arguments.deadline:g} s: {_line(error)}"
        code = _end(why, arguments, rank, size, absent)
        if rank == 0:
            time.sleep(GRACE)  # the others may ask its store yet who is missing
        return code
    exchange = GroupExchange(dist.group.WORLD, arguments.deadline)  # type: ignore[arg-type]  # there is one now
    try:
        found = examine(
            exchange, device=device, deadline=arguments.deadline, required=arguments.require, new_memory=_memory(device)
        )
    except (K3CommError, RuntimeError) as error:
        return _end(f"{type(error).__name__}: {_without_frames(error)}", arguments, rank, size)
    try:
        code = _speak(found, arguments, rank)
    finally:
        # A launcher ends all ranks after the first that leaves with an error: rank 0 has spoken by now.
        with suppress(RuntimeError, K3CommError):  # a rank that is gone is past waiting for
            exchange.min([0])
            dist.destroy_process_group()
    return code


def _meet(place: tuple[str, int, bool], rank: int, size: int, deadline: float) -> tuple[Store, tuple[int, ...]]:
    """The job's store, and the ranks that have not come to it within `deadline` seconds.

    Raises:
        RuntimeError: the store can't be made, or not be reached.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port, of_launcher = place
    try:
        store: Store = TCPStore(
            address,
            port,
            size,
            is_master=rank == 0 and not of_launcher,
            timeout=timedelta(seconds=deadline),
            wait_for_workers=False,  # it would say how many are missing, and not which
            multi_tenant=True,
        )
        store = PrefixStore("k3comm doctor", store)
        keys = [f"came/{one}" for one in range(size)]
        store.set(keys[rank], "")
        with suppress(RuntimeError):  # its text names no rank
            store.wait(keys, timedelta(seconds=deadline))
        return store, tuple(one for one, key in enumerate(keys) if not store.check([key]))
    except RuntimeError as error:
        whose = (
            "the launcher's store" if of_launcher else "its store" if rank == 0 else "rank 0 did not come, or its store"
        )
        raise RuntimeError(f"{whose} at {address}:{port} can't be used: {_line(error)}") from error


def examine(
    exchange: GroupExchange,
    *,
    device: str,
    deadline: float,
    required: list[Tier],
    new_memory: Callable[[int, int], SymmetricMemory],
) -> Checkup:
    """The checks of a job, over its default group. Collective; equal on every rank.

    Raises:
        K3CommError: a rank did not come within `deadline` seconds, or is gone.
    """
    import torch.distributed as dist

    from k3comm.cli._checkup import Checkup, gather_facts, tiers_agreed, timed_votes
    from k3comm.communicator import Communicator
    from k3comm.errors import NegotiationError

    settings = Settings(
        vote_deadline=deadline,
        rendezvous_deadline=deadline,
        poll_deadline=deadline,
        record="off",
        sources=dict.fromkeys(("vote_deadline", "rendezvous_deadline", "poll_deadline", "record"), "doctor"),
    )
    try:
        comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings, device=device, name="doctor")
    except NegotiationError as error:  # the same text on every rank
        return Checkup(ranks=exchange.size, job=True, error=str(error))
    with comm:
        report, votes = comm.report, timed_votes(exchange)
        with comm._exchange.together("doctor") as watched:  # so that who is missing is named here too
            pairs = _pairs(report.decision, device, watched.at("the pair check"), new_memory)
            facts = gather_facts(report.facts, watched.at("the facts"))
        return Checkup(
            ranks=exchange.size,
            job=True,
            hosts=len(set(report.decision.hosts)),
            settings=_settings(report.settings),
            facts=facts,
            tiers=tiers_agreed(report.decision),
            windows=f"{report.windows.source} ({report.windows.family})",
            notes=[*([report.windows_warning] if report.windows_warning else []), *not_run(device)],
            pairs=pairs,
            vote_us=votes,
            required=tuple(required),
        )


def _memory(device: str) -> Callable[[int, int], SymmetricMemory]:
    """Maker of the memory that the ranks of the default group share on such a device."""
    import torch
    import torch.distributed as dist

    from k3comm.buffers.cuda import CudaMemory
    from k3comm.buffers.host import HostMemory

    if device == "cpu":
        return HostMemory

    here = torch.device("cuda", torch.cuda.current_device())
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]  # there is one by now
    return partial(CudaMemory, group_name=name, device=here)


def _pairs(
    decision: Decision, device: str, exchange: Exchange, new_memory: Callable[[int, int], SymmetricMemory]
) -> PairCheck:
    from k3comm.cli._checkup import PairCheck, check_pairs, shares_memory

    if not shares_memory(decision):
        return PairCheck(why_not="not tried: no agreed tier works over shared memory")
    if exchange.size == 1:
        return PairCheck(why_not="not tried: one rank has no pair")
    return check_pairs(new_memory(exchange.rank, exchange.size), exchange)


def _speak(found: Checkup, arguments: argparse.Namespace, rank: int) -> int:
    """Rank 0 shows the result, which is every rank's; the exit code."""
    if rank == 0:
        _show(found, arguments.json)
    return found.exit_code


def _end(error: str, arguments: argparse.Namespace, rank: int, size: int, absent: tuple[int, ...] = ()) -> int:
    """The end of a check that this rank could not finish; rank 0 may be the one that is gone, so each says it."""
    from k3comm.cli._checkup import Checkup

    if rank:
        _console.complain(f"k3comm: rank {rank}: {_line(error)}")
        time.sleep(GRACE)
    return _speak(Checkup(ranks=size, job=True, error=error, absent=absent), arguments, rank)


# On the terminal


def _show(found: Checkup, as_json: bool) -> None:
    if as_json:
        from k3comm import __version__

        _console.show_json({"k3comm": __version__, **found.to_dict()})
        return
    where = f"{_count(found.ranks, 'rank')} on {_count(found.hosts, 'host')}" if found.job else "this machine, alone"
    blocks: list[str | _console.Table] = [f"k3comm doctor: {where}"]
    if found.facts:
        given = [f"{name}={e['value']} ({e['source']})" for name, e in found.settings.items() if e["given"]]
        lines = [f"windows: {found.windows}", f"settings: {', '.join(given) or 'all default'}", ""]
        blocks += map(printable, lines)
        blocks += [_facts_table(found), _tiers_table(found)]
    if found.pairs.pairs:
        blocks.append(_pairs_table(found))
    elif found.pairs.why_not and not found.pairs.failed:
        blocks.append(printable(f"pairs: {found.pairs.why_not}"))
    if found.vote_us:
        slowest = max(found.vote_us)
        blocks.append(f"a vote takes {slowest} us (median, slowest rank: {found.vote_us.index(slowest)})")
    blocks += [printable(f"note: {note}") for note in found.notes]
    if found.error:
        blocks.append(f"FAILED {found.error}")  # its lines are its own
    blocks += [printable(f"FAILED {text}") for text in found.pairs.problems]
    blocks += [printable(f"MISSING {text}") for text in found.missing]
    blocks.append("all is well" if found.exit_code == 0 else f"not well: exit code {found.exit_code}")
    _console.show(*blocks)


def _facts_table(found: Checkup) -> _console.Table:
    from k3comm.cli._checkup import remedy

    return _console.Table(
        title="Facts" + (" (those that differ with their ranks)" if found.job else ""),
        columns=["fact", "value", "what may help"],
        rows=[
            [name, f"{text} ({who})" if who else text, remedy(name, text)] for name, text, who in found.facts_by_value()
        ],
    )


def _tiers_table(found: Checkup) -> _console.Table:
    def cells(capacity: int, why_not: str) -> list[str | _console.Cell]:
        can = "any m" if capacity == UNLIMITED else f"m <= {capacity}"
        return [_console.Cell(can, _console.GOOD) if capacity else _console.Cell("no", _console.BAD), why_not]

    def row(state: TierState) -> list[str | _console.Cell]:
        across = [] if state.across_hosts is None else cells(*state.across_hosts)
        return [_console.tier_cell(state.tier), *cells(state.capacity, state.why_not), *across]

    columns = ["tier", "agreed", "who says no, and why"]
    title = "Tiers, best first"
    if not found.job:
        columns = ["tier", "one host", "what it lacks", "across hosts", "what it lacks"]
        title = f"Tiers, best first: what {_count(found.ranks, 'rank')} like this one would say, Kimi-K3's shapes"
    return _console.Table(title=title, columns=columns, rows=[row(state) for state in found.tiers])


def _pairs_table(found: Checkup) -> _console.Table:
    """A matrix: the row's rank writes to, and reads from, the column's."""
    pairs = {(pair.rank, pair.peer, pair.kind): pair for pair in found.pairs.pairs}
    rows: list[list[str | _console.Cell]] = []
    for rank in range(found.ranks):
        cells: list[str | _console.Cell] = [f"rank {rank}"]
        for peer in range(found.ranks):
            bad = [kind for kind in ("write", "read") if peer != rank and not pairs[rank, peer, kind].good]
            cells.append(
                "-" if peer == rank else _console.Cell(" ".join(bad), _console.BAD) if bad
                else _console.Cell("ok", _console.GOOD)
            )  # fmt: skip
        rows.append(cells)
    nbytes = found.pairs.pairs[0].nbytes
    return _console.Table(
        title=f"Pairs: {nbytes} bytes written to, and read from, each peer's shared memory; failed ones by name",
        columns=["from", *(f"to {peer}" for peer in range(found.ranks))],
        rows=rows,
    )


# Odds and ends


def _windows(facts: Facts, settings: Settings, ranks: int) -> tuple[Windows[Tier], list[str]]:
    if settings.windows is not None:
        return load_windows(settings.windows), []
    choice = choose_windows(facts.family, ranks)
    return choice.windows, [choice.warning] if choice.warning else []


def _settings(settings: Settings) -> dict[str, dict[str, str]]:
    """Value and source by name; `given` is the source again where it is not the default, or else ""."""
    sources = settings.sources
    return {
        name: {
            "value": value,
            "source": sources[name],
            "given": "" if sources[name] == "default" else sources[name],
        }
        for name, value in settings.describe().items()
    }


def _device(wanted: str) -> str:
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise InputError("--device: cuda given; torch finds no GPU here")
    return ("cuda" if there else "cpu") if wanted == "auto" else wanted


def _tier(text: str) -> Tier:
    if text.strip().upper() not in Tier.__members__:
        raise argparse.ArgumentTypeError(f"no tier is called {text!r}; accepted are {', '.join(Tier.__members__)}")
    return Tier[text.strip().upper()]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} given; accepted are seconds from 1 to {MAX_SECONDS}")
    return seconds


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _line(error: object) -> str:
    return " ".join(_without_frames(error).split())


def _without_frames(error: object) -> str:
    """An error's text without the lines that only the makers of torch can use."""
    return "\n".join(line for line in str(error).splitlines() if not FRAMES.match(line))
