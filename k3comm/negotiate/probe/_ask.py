"""How anything is asked: an answer, or why there is none; never an exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from k3comm.buffers.symmetric import describe
from k3comm.facts import Unknown, driver_error

T = TypeVar("T")


class DriverError(LookupError):
    """A result of the CUDA driver other than 0."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {driver_error(code)[1]}")
        self.code = code


def ask(question: Callable[[], T]) -> T | Unknown:
    """What `question` returns; Unknown, with the reason, if it raises. A LookupError's text is the reason itself."""
    try:
        return question()
    except Exception as error:  # whatever a driver, a container or a shim raises: an unknown, not an end
        code = getattr(error, "code", None) or getattr(error, "errno", None)
        # KeyError and IndexError quote what was missing, which says nothing without the kind.
        plain = isinstance(error, LookupError) and not isinstance(error, KeyError | IndexError)
        return Unknown(_text(error) if plain else describe(error), code if type(code) is int else 0)


def yes_or_no(value: object) -> bool:
    """True for 1, False for 0, whatever integer type says it.

    Raises:
        LookupError: anything else, which is neither a yes nor a no.
    """
    if value not in (0, 1):
        raise LookupError(f"{value!r} given where 0 or 1 was expected")
    return bool(value)


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # not even its text may end the probe
        return type(error).__name__
