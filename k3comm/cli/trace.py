"""Request traces: when each request arrived, how long its prompt was, how many tokens it was answered with.

The format is that of the Azure LLM inference trace 2023 (CC-BY 4.0, see `k3comm/data/README.md`), a CSV file:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

Pure: no torch, no clock.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path

import attrs

from k3comm.errors import InputError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 10_000_000
"""The longest prompt or answer that is believed. A damaged line would otherwise keep a replay busy for days."""
EXCERPT = "AzureLLMInferenceTrace_code_excerpt.csv"
CITATION = (
    "Azure LLM inference trace 2023 (code), Microsoft, CC-BY 4.0, https://github.com/Azure/AzurePublicDataset; "
    "Patel et al., Splitwise, ISCA 2024"
)


@attrs.frozen
class Request:
    """One request.

    Attributes:
        arrival: microseconds since the trace's first request.
        prompt: tokens of the prompt, at least 1.
        generated: tokens of the answer; 0 is a prompt that was only read.
    """

    arrival: int
    prompt: int
    generated: int


@attrs.frozen(kw_only=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        requests: at least one.
        source: where they were read, for people.
        moved: lines that stood in the file before an earlier request; sorting put them right.
    """

    requests: tuple[Request, ...]
    source: str
    moved: int = 0

    @property
    def span(self) -> int:
        """Microseconds from the first to the last arrival."""
        return self.requests[-1].arrival


def load_trace(path: str | Path) -> Trace:
    """Reads a trace file.

    Raises:
        InputError: the file can't be read or is not in the format; names the file, the line, what stands there and
            what is accepted.
    """
    try:
        # utf-8-sig: spreadsheets put a byte order mark in front.
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: can't be read as text: {error}") from None
    return parse_trace(text.splitlines(), str(path))


def packaged_trace() -> Trace:
    """The excerpt that ships with k3comm: the first 2,000 requests of the Azure code trace."""
    text = (resources.files("k3comm") / "data" / EXCERPT).read_text(encoding="utf-8")
    return parse_trace(text.splitlines(), EXCERPT)


def parse_trace(lines: Iterable[str], source: str) -> Trace:
    """Reads a trace from its lines. `source` names it in errors.

    Lines may be out of order (merged files are): they are sorted by time, stably, and `Trace.moved` counts them.

    Raises:
        InputError: as `load_trace`.
    """
    rows = csv.reader(lines)
    header = tuple(cell.strip() for cell in next(rows, []))
    if header != COLUMNS:
        given = repr(",".join(header)) if header else "nothing"
        raise InputError(f"{source}: line 1: {given} given; accepted is the header {','.join(COLUMNS)}")
    arrivals: list[tuple[datetime, int, int]] = []
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                arrivals.append(_request(row, f"{source}: line {rows.line_num}"))
    except csv.Error as error:
        raise InputError(f"{source}: line {rows.line_num}: not CSV: {error}") from None
    if not arrivals:
        raise InputError(f"{source}: no request after the header; accepted are traces with at least one")
    moved = 0
    latest = arrivals[0][0]
    for arrival, _, _ in arrivals:
        moved += arrival < latest
        latest = max(latest, arrival)
    arrivals.sort(key=lambda request: request[0])
    first = arrivals[0][0]
    requests = tuple(
        Request((arrival - first) // timedelta(microseconds=1), prompt, generated)
        for arrival, prompt, generated in arrivals
    )
    return Trace(requests=requests, source=source, moved=moved)


def _request(row: list[str], place: str) -> tuple[datetime, int, int]:
    if len(row) != len(COLUMNS):
        raise InputError(f"{place}: {len(row)} fields given; accepted are the {len(COLUMNS)} of {','.join(COLUMNS)}")
    timestamp, prompt, generated = (cell.strip() for cell in row)
    try:
        arrival = datetime.fromisoformat(timestamp)
    except ValueError:
        raise InputError(
            f"{place}: TIMESTAMP: {timestamp!r} given; accepted are times like 2023-11-16 18:17:03.9799600"
        ) from None
    if arrival.tzinfo is None:
        arrival = arrival.replace(tzinfo=UTC)
    return arrival, _tokens(prompt, COLUMNS[1], 1, place), _tokens(generated, COLUMNS[2], 0, place)


def _tokens(text: str, column: str, least: int, place: str) -> int:
    # int() alone would also take "1_000", "+5" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= MAX_TOKENS):
        raise InputError(f"{place}: {column}: {text!r} given; accepted are whole numbers from {least} to {MAX_TOKENS}")
    return int(text)
