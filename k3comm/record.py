"""The decision recorder: a line for each call of a handle, on disk before the call talks to a peer.

`settings.record` (K3COMM_RECORD) names a folder, made if it is absent. Each communicator writes
`<folder>/<name>.rank<r>.log`, r being the rank in the job, so that groups of one name don't meet; a file that is there
is kept as `<file>.old`. The format is text, and says nothing that is one rank's alone: `diff` of two ranks' files shows
the lines in which what they did differs, and nothing else; `k3comm report` names ranks and values.

    # k3comm record 1
    # communicator: base
    ...
    call=0 part=tail layer=3 num_tokens=64 graph=0 decode=1 output=full next_norm=0 residual=1 lane=0 ...

A line is one write of the operating system: it outlives the process, whatever ends it (but not a crash of the machine).
A captured graph's calls are recorded once, at capture; replays run no Python and leave no line. What can't be written
later on (a full disk) is one warning and the end of the record: a diagnosis ends no job.

Pure: neither torch nor a peer.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import attrs

from k3comm.errors import InputError, SettingsError

MAGIC = "# k3comm record 1"
"""The first line of every file; the number is the format's."""
CLOSED = "# closed"
"""The last line, where the communicator was closed."""
MAX_LINE = 1 << 16
"""Characters of a line that are read. A call's has about 250; a header's settings may have a few thousand."""

_log = logging.getLogger("k3comm")


@attrs.frozen(kw_only=True)
class CallRecord:
    """What one call of a handle was, as far as it must be equal on all ranks.

    Attributes:
        call: its number in the communicator, from 0, whatever the layer.
        part: "tail", or a part of SEPARATE_REDUCE: "reduce", "reduce_shared", "finish", "finish_shared", "finish_both".
        layer: the handle's index. num_tokens: rows m.
        graph, decode: what the choice was made for. output, next_norm: the call's arguments.
        residual: whether one is given. lane: the micro-batch.
        norm, bias: whether the layer has them. up: "whole", "sharded", "project" or "project-sharded".
        precise, scale: the layer's. capture: a CUDA graph is being captured.
        tier: what was chosen.
        by: "selected" or "forced" (the tier was asked for by name), with "plan-" before it where a plan was given.
            Shown, and not compared: two ways to one tier are no difference.
    """

    call: int
    part: str
    layer: int
    num_tokens: int
    graph: bool
    decode: bool
    output: str
    next_norm: bool
    residual: bool
    lane: int
    norm: bool
    bias: bool
    up: str
    precise: bool
    scale: float
    capture: bool
    tier: str
    by: str

    def line(self) -> str:
        """One line of text, without its end."""
        return " ".join(f"{name}={_word(getattr(self, name))}" for name in FIELDS)


FIELDS = tuple(field.name for field in attrs.fields(CallRecord))
COMPARED = tuple(name for name in FIELDS if name != "by")
"""What must be equal on all ranks, in the order in which differences are told."""


def parse_call(line: str) -> dict[str, str]:
    """The fields of a line by name; what is no `name=value` is left out."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def check_folder(folder: str | os.PathLike[str] | None) -> None:
    """Makes the folder, and a file in it, so that a rank that can't write there says so before the vote.

    Raises:
        SettingsError: names the folder and what stands in the way.
    """
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"record: {os.fspath(folder)!r} given; accepted is a folder that can be written to ({error.strerror})"
        ) from None


class Recorder:
    """Writes one rank's file.

    Args:
        folder: where. name: the communicator's. rank: this rank's in the job.
        header: what is said first, by name; the same on every rank.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, rank: int, header: Mapping[str, str]) -> None:
        # surrogatepass: any str is a name that an engine may give, also one that no encoding has.
        self.path = Path(folder, f"{quote(name, safe='', errors='surrogatepass')}.rank{rank}.log")
        self._file: io.FileIO | None = None
        self._process = os.getpid()
        try:
            if self.path.exists():
                self.path.rename(f"{self.path}.old")
            self._file = io.FileIO(self.path, "x")
        except OSError as error:
            self._give_up(error)
        self.write("\n".join([MAGIC, *(f"# {key}: {' '.join(value.split())}" for key, value in header.items())]))

    def write(self, line: str) -> None:
        """Adds a line, and hands it to the operating system."""
        if self._file is None or os.getpid() != self._process:  # a forked child is no rank
            return
        try:
            self._file.write(f"{line}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Says so in the file. May be called again."""
        self.write(CLOSED)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _log.warning("the record in %s ends here: %s", self.path, error)
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self._file.close()  # type: ignore[union-attr]  # not None, as asked above


@attrs.frozen(kw_only=True)
class Record:
    """One rank's file, without its calls, which may be many: `lines` reads them.

    Attributes:
        path: the file. rank: the rank in the job, by the file's name.
        header: by name; empty where the rank was ended before it had written it.
    """

    path: Path
    rank: int
    header: Mapping[str, str]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Record:
        """Opens a file.

        Raises:
            InputError: it can't be read, or is none of a recorder. A file without a whole line may be one.
        """
        place = Path(path)
        stem, _, number = place.name.removesuffix(".old").removesuffix(".log").rpartition(".rank")
        if not stem or not (number.isascii() and number.isdigit()):
            raise InputError(f"{place}: accepted are a recorder's files, which end in .rank<number>.log")
        header: dict[str, str] = {}
        for number_of_line, line in enumerate(_read(place)):
            if number_of_line == 0:
                if line != MAGIC:
                    raise InputError(f"{place}: line 1: {line[:80]!r}; accepted is {MAGIC!r}")
            elif line.startswith("# ") and line != CLOSED:
                key, _, value = line.removeprefix("# ").partition(": ")
                header[key] = value
            else:
                break
        return cls(path=place, rank=int(number), header=header)

    def lines(self) -> Iterator[str]:
        """The calls' lines, and CLOSED if the communicator was closed."""
        return (line for line in _read(self.path) if line and (not line.startswith("#") or line == CLOSED))


def records_in(paths: Sequence[str | os.PathLike[str]]) -> list[Record]:
    """The files that are named, and of each folder those in it (but for `.old` ones), in the order of their ranks.

    Raises:
        InputError: a file that is none of a recorder, or a folder without one.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        try:
            os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            raise InputError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
        found = sorted(path.glob("*.rank*.log")) if path.is_dir() else [path]
        if not found:
            raise InputError(f"{path}: there is no recorder's file in this folder (*.rank<number>.log)")
        files += found
    return sorted((Record.of(file) for file in dict.fromkeys(files)), key=lambda record: record.rank)


def _read(path: Path) -> Iterator[str]:
    """The file's lines. A last one without an end was cut off in writing, and is left out.

    Only regular files are read, and no line beyond MAX_LINE: a pipe would block, and a device has no end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path}: accepted are regular files")
        with open(path, encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            while line := file.readline(MAX_LINE):
                if line.endswith("\n"):
                    yield line[:-1]
                elif len(line) >= MAX_LINE:
                    raise InputError(f"{path}: a line of more than {MAX_LINE} characters; accepted are shorter ones")
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None


def _word(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
