"""The command line: `python -m k3comm COMMAND`, or `k3comm COMMAND` where it is installed.

Each command is a module of this package named after it, with a `HELP` line, `configure(parser)` and `run(arguments)`,
which returns the exit code: 0 is well, 1 is a finding (a bound missed), 2 is a question that could not be answered (bad
arguments, a malformed file, any K3CommError); 3 is one of ranks: `doctor`, they can't work together; `report`, one left
no record. Modules import what is slow, torch first of all, only when they run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from k3comm import __version__
from k3comm.cli import _console
from k3comm.errors import K3CommError

COMMANDS = ("tiers", "replay", "demo", "doctor", "report", "bench", "tune")
"""The commands, in the order of the help."""


class Command(Protocol):
    """What a command's module holds."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code.

    Args:
        argv: the arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: by argparse: 2 after a wrong argument, 0 after `--help`.
    """
    try:
        with _console.writing():  # before any work: standard output may be closed
            pass
        parser, commands = _parser()
        try:
            arguments = parser.parse_args(argv)
        except SystemExit:  # after the help, which may not have been written yet
            with _console.writing():
                pass
            raise
        return commands[arguments.command].run(arguments)
    except _console.OutputError as error:
        _console.complain(f"k3comm: {error}")
        _drop_output()
        return 2
    except K3CommError as error:
        _console.complain(f"k3comm: {' '.join(str(error).splitlines())}")
        return 2
    except BrokenPipeError:  # the reader has gone (`| head`)
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return 130


def _drop_output() -> None:
    """Whatever is still buffered goes nowhere, and the interpreter's exit is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    parser = argparse.ArgumentParser(
        prog="k3comm", description="The communication tail of a tensor-parallel latent mixture-of-experts layer."
    )
    parser.add_argument("--version", action="version", version=f"k3comm {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name in COMMANDS:
        command = cast(Command, import_module(f"{__name__}.{name}"))
        sub = subparsers.add_parser(
            name, help=command.HELP, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.configure(sub)
        commands[name] = command
    return parser, commands
