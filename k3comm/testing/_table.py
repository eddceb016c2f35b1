"""Truth tables: what a selector must choose, as CSV files."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import attrs

from k3comm.errors import InputError
from k3comm.tiers import Agreement, Axes, Tier

COLUMNS = ["num_tokens", "graph", "decode", "agreed", "capacities", "expected"]


@attrs.frozen
class TruthRow:
    """One row: for these axes and this agreement, that tier. `line` is the place in the file."""

    line: int
    axes: Axes
    agreement: Agreement[Tier]
    expected: Tier


def load_truth_table(path: str | os.PathLike[str]) -> list[TruthRow]:
    """Reads a truth table.

    Columns: num_tokens, graph (0 or 1), decode (0 or 1), agreed (tiers joined by +), capacities (TIER:rows joined by
    ;, for agreed limits that differ from the window's), expected (a tier). Lines that start with # are comments.

    Raises:
        InputError: the file can't be read as text, or is not in the format; names file, line, what stands there and
            what is accepted.
    """
    rows: list[TruthRow] = []
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read as text: {error}") from None
    lines = [(n, text) for n, text in enumerate(content.splitlines(), 1)]
    lines = [(n, text) for n, text in lines if text.strip() and not text.startswith("#")]
    heading = lines[0][1] if lines else ""
    try:
        named = next(csv.reader([heading]))
    except csv.Error:
        named = []
    if named != COLUMNS:
        raise InputError(f"{path}: heading {heading!r} given; accepted is {','.join(COLUMNS)}")
    for number, text in lines[1:]:
        try:
            tokens, graph, decode, agreed, capacities, expected = next(csv.reader([text]))
            limits = dict(pair.split(":") for pair in capacities.split(";") if pair)
            rows.append(
                TruthRow(
                    number,
                    Axes(num_tokens=int(tokens), graph=_flag(graph), decode=_flag(decode)),
                    Agreement.of(
                        [Tier[name] for name in agreed.split("+")],
                        {Tier[name]: int(limit) for name, limit in limits.items()},
                    ),
                    Tier[expected],
                )
            )
        except (ValueError, KeyError, csv.Error) as error:
            raise InputError(
                f"{path}:{number}: {text!r} given; accepted are rows of {','.join(COLUMNS)} ({error})"
            ) from None
    return rows


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"
