"""Compares what the decision recorder wrote on several ranks, and shows where they first differ.

FILE is a recorder's file (NAME.rank3.log), or a folder with them (K3COMM_RECORD). Files of one communicator and group
are compared with each other; several communicators one after the other. Where names that nobody gave (k3comm-0, by
each process's own count) differ between the ranks, a group's communicators are matched by their order. A file that ends
earlier than the others, as of a rank that was killed or hangs, is a difference too.

Exit codes: 0 all ranks did the same; 1 they differ; 2 a file can't be read, or is none of a recorder; 3 no difference
was found, but a rank of the group has no file, or an empty one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import attrs

from k3comm.cli import _console
from k3comm.errors import InputError
from k3comm.negotiate.decide import name_ranks
from k3comm.record import CLOSED, Record, parse_call, records_in
from k3comm.uniform import differences

DEFAULT_NAME = re.compile(r"k3comm-(?:.*-)?([0-9]+)")
"""What a communicator is called that was given no name: a count of its process, which may differ between ranks."""

HELP = "where the decision recorder's files of several ranks first differ"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `report`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recorder's file, or a folder with some")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Compares the files, communicator by communicator."""
    records = records_in(arguments.files)
    begun, empty = [one for one in records if one.header], [one for one in records if not one.header]
    if not begun:
        raise InputError(f"{records[0].path}: accepted are a recorder's files; this one has no header")
    results = [compare(group) for group in _groups(begun)]
    notes = [f"{one.path}: empty: rank {one.rank} was ended before it had written its header" for one in empty]
    if arguments.json:
        communicators = [attrs.asdict(result) for result in results]
        _console.show_json({"schema": 1, "communicators": communicators, "empty": [str(one.path) for one in empty]})
    else:
        _console.show(*(line for result in results for line in _lines(result)), *notes)
    if any(result.difference for result in results):
        return 1
    return 3 if empty or any(result.absent for result in results) else 0


@attrs.frozen(kw_only=True)
class Comparison:
    """What came of one communicator's files.

    Attributes:
        communicator: its name, or names. ranks: of the job, whose files were compared. absent: the group's other ranks.
        calls: how many all ranks made alike, from the first.
        difference: what differs then, in words; "" if nothing does.
        lines: each rank's line there, as it stands in the file; "" where the file has ended.
    """

    communicator: str
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    calls: int
    difference: str
    lines: dict[int, str]


def compare(records: Sequence[Record]) -> Comparison:
    """Compares the files of one communicator, given in the order of ranks, line by line."""
    ranks = tuple(record.rank for record in records)
    if len(set(ranks)) < len(ranks):
        raise InputError(f"two files of one rank given: {', '.join(str(record.path) for record in records)}")
    words = records[0].header.get("group", "").split()
    group = tuple(int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 20)
    calls, difference, lines = 0, _headers(records), {}
    for row in zip_longest(*(record.lines() for record in records)) if not difference else ():
        if len(set(row)) > 1:
            lines = {rank: line or "" for rank, line in zip(ranks, row, strict=True)}
            difference = _difference(lines)
            if difference:
                break
        calls += row[0] != CLOSED
    return Comparison(
        communicator=", ".join(dict.fromkeys(record.header.get("communicator", "?") for record in records)),
        ranks=ranks,
        absent=tuple(rank for rank in group if rank not in ranks),
        calls=calls,
        difference=difference,
        lines=lines if difference else {},
    )


def _difference(lines: dict[int, str]) -> str:
    """What differs in one line of every rank; "" if nothing that counts does."""
    ended = [rank for rank, line in lines.items() if not line]
    closed = [rank for rank, line in lines.items() if line == CLOSED]
    calls = {rank: parse_call(line) for rank, line in lines.items() if line and line != CLOSED}
    texts = differences(calls) if len(calls) > 1 else []
    if calls and ended:
        texts.append(f"{name_ranks(ended)}: no further call, and not closed (killed, or stuck in the call before)")
    if calls and closed:
        texts.append(f"{name_ranks(closed)}: closed")
    if not calls and ended and closed:
        texts.append(f"{name_ranks(ended)}: not closed, unlike {name_ranks(closed)}")
    if not texts and len({_compared(lines[rank]) for rank in calls}) > 1:
        texts.append("the lines differ, and not in a field of a call: a file is damaged, or of another version")
    return "; ".join(texts)


def _compared(line: str) -> tuple[str, ...]:
    """The words of a line but for `by`, which is no difference."""
    return tuple(word for word in line.split() if not word.startswith("by="))


def _headers(records: Sequence[Record]) -> str:
    """What differs in the headers; "" if nothing does."""
    found = []
    for name in dict.fromkeys(name for record in records for name in record.header):
        ranks: dict[str, list[int]] = {}
        for record in records:
            ranks.setdefault(record.header.get(name, "absent"), []).append(record.rank)
        counted = name == "communicator" and all(DEFAULT_NAME.fullmatch(value) for value in ranks)
        if len(ranks) > 1 and not counted:
            sides = "; ".join(f"{value} on {name_ranks(who)}" for value, who in ranks.items())
            found.append(f"header, {name}: {sides}")
    return "; ".join(found)


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """The files of one communicator together: equal name and group.

    Names that nobody gave are counts of a process. Where every rank has as many such files of one group, they are
    matched by the order of the counts; else a file is missing, and names are the better guess.
    """
    counted: dict[str | None, dict[int, list[Record]]] = {}
    for record in sorted(records, key=lambda record: _count(record.header.get("communicator"))):
        if _count(record.header.get("communicator")) >= 0:
            counted.setdefault(record.header.get("group"), {}).setdefault(record.rank, []).append(record)
    places = {
        record.path: place
        for ranks in counted.values()
        if len({len(own) for own in ranks.values()}) == 1
        for own in ranks.values()
        for place, record in enumerate(own)
    }
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        who: object = places.get(record.path, record.header.get("communicator"))
        groups.setdefault((who, record.header.get("group")), []).append(record)
    return list(groups.values())


def _count(name: str | None) -> int:
    """The number in a name that nobody gave; -1 for other names."""
    match = DEFAULT_NAME.fullmatch(name or "")
    return int(match[1]) if match and len(match[1]) < 20 else -1


def _lines(result: Comparison) -> list[str]:
    who = f"{result.communicator}, {name_ranks(result.ranks)}"
    absent = [f"  MISSING: no record of {name_ranks(result.absent)}"] if result.absent else []
    if not result.difference:
        alike = "the same on these, and not known of the others" if absent else "the same on all"
        return [f"{who}: {result.calls} calls, {alike}", *absent]
    shown = [f"  rank {rank}: {line or '(the file ends here)'}" for rank, line in result.lines.items()]
    return [f"{who}: the same for {result.calls} calls, then DIFFERENT", f"  {result.difference}", *shown, *absent]
