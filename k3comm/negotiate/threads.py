"""Threads that ask a store, ended in good time.

They are daemons, since one that waits for a stopped host must not keep a process. But a daemon that comes back from a
call while the interpreter ends is unwound inside C++, which aborts the process; so at the exit they get a moment.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

EXIT_SECONDS = 1.0
"""How long a process's exit waits for all of them."""

_ends: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()


def start_thread(name: str, work: Callable[[], None], end: Callable[[], None] = lambda: None) -> threading.Thread:
    """Starts a daemon.

    Args:
        name: the thread's.
        work: what it does.
        end: called at the process's exit, if it is at work still, to ask it to stop.

    Raises:
        RuntimeError: the interpreter is ending.
    """
    _watch_exit()
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    _ends[thread] = end
    return thread


@cache
def _watch_exit() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    limit = time.monotonic() + EXIT_SECONDS
    alive = [(thread, end) for thread, end in list(_ends.items()) if thread.is_alive()]
    for _, end in alive:
        end()
    for thread, _ in alive:
        thread.join(max(0.0, limit - time.monotonic()))
