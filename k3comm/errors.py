"""What k3comm raises.

    K3CommError
    |-- InputError (ValueError)             an argument that is not accepted: what was given, what would be
    |   `-- PlanError                       a plan that does not fit: other communicator, too few rows, other arguments
    |-- SettingsError (ValueError)          a setting or environment variable that is malformed
    |-- WindowsError (ValueError)           a windows file that is not valid; names the file and the place in it
    |-- NegotiationError (RuntimeError)     the ranks differ; the same text on every rank
    |-- DivergenceError (RuntimeError)      check_uniform: a call differs between the ranks; the same text on every rank
    |-- TierUnavailableError (RuntimeError) a tier asked for by name that is not agreed or can't honour the arguments
    |-- ClosedError (RuntimeError)          a communicator that is closed
    |-- CaptureError (RuntimeError)         something that must not happen while a CUDA graph is captured
    |-- KernelError (RuntimeError)          a device kernel that can't be compiled, loaded or launched
    |-- RendezvousError (RuntimeError)      torch's rendezvous of device memory failed here; peers may wait in it
    |-- CommunicationTimeoutError (RuntimeError)   a collective that did not finish within its deadline
    `-- PeerTimeoutError (RuntimeError)     a peer whose data did not come in time; names the peer

Everything but the last three is raised before a peer is involved, or identically on every rank; the one exception is an
InputError about what a `project=` callable returned, which is known only mid-call.
"""

from __future__ import annotations


class K3CommError(Exception):
    """The root of everything that k3comm raises on purpose."""


class InputError(K3CommError, ValueError):
    """An argument is not accepted. The text says what was given and what is accepted."""


class PlanError(InputError):
    """A plan does not fit the call: another communicator's, made for fewer rows, or for other arguments."""


class SettingsError(K3CommError, ValueError):
    """A setting is malformed, or asks for something this version does not serve. Names the setting and its source."""


class WindowsError(K3CommError, ValueError):
    """A windows file is not valid. Names the file and the place in it."""


class NegotiationError(K3CommError, RuntimeError):
    """The ranks can't agree. Every rank raises it with the same text."""


class DivergenceError(K3CommError, RuntimeError):
    """A call differs between the ranks (`settings.check_uniform`). Every rank raises it, with the same text.

    No rank has made the call, and the communicator goes on. Ranks in a collective method of a communicator instead of
    a call raise NegotiationError with that text.

    Attributes:
        ranks: the group's ranks that differ from most; empty where no call is that of most ranks.
    """

    def __init__(self, text: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks


class TierUnavailableError(K3CommError, RuntimeError):
    """A tier was asked for by name and is not agreed, or can't honour the call's arguments."""


class ClosedError(K3CommError, RuntimeError):
    """The communicator is closed, or broken by an error between a call's collectives."""


class CaptureError(K3CommError, RuntimeError):
    """Not allowed while a CUDA graph is being captured."""


class KernelError(K3CommError, RuntimeError):
    """A device kernel can't be compiled, loaded or launched. Names the kernel, and the compiler's text or the limit."""


class RendezvousError(K3CommError, RuntimeError):
    """Torch's rendezvous of device memory failed on this rank, in the middle of a collective. Fatal: peers may hang.

    They wait in it until their own deadlines, and nothing on this rank can call them out of it.
    """


class CommunicationTimeoutError(K3CommError, RuntimeError):
    """A collective did not finish within its deadline (`settings.vote_deadline`, `settings.poll_deadline`)."""


class PeerTimeoutError(K3CommError, RuntimeError):
    """A peer's data did not arrive within `settings.poll_deadline`: it is late, or gone.

    Attributes:
        ranks: the group's ranks that are missing.
    """

    def __init__(self, text: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks
