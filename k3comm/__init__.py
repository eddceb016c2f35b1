"""k3comm finishes a tensor-parallel latent mixture-of-experts layer.

It finds out what every rank can do, agrees on it once, and from then on picks and runs, forward by forward, the
fastest communication tier that every rank is certain to pick too. Importing it loads neither torch nor a driver.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3comm.buffers.symmetric import Exchange
    from k3comm.communicator import Communicator
    from k3comm.errors import (
        CaptureError,
        ClosedError,
        CommunicationTimeoutError,
        DivergenceError,
        InputError,
        K3CommError,
        KernelError,
        NegotiationError,
        PeerTimeoutError,
        PlanError,
        RendezvousError,
        SettingsError,
        TierUnavailableError,
        WindowsError,
    )
    from k3comm.facts import Facts, Verdict
    from k3comm.moe_tail import MoETail
    from k3comm.operations import AttentionReduceOp, MoETailOp, RouteExchangeOp, TopKPackOp
    from k3comm.settings import Settings
    from k3comm.spec import LatentMoESpec, ParallelLayout
    from k3comm.tiers import Numerics, Tier
    from k3comm.tiers.interface import Plan

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

_MODULES = {
    "AttentionReduceOp": "operations",
    "CaptureError": "errors",
    "ClosedError": "errors",
    "CommunicationTimeoutError": "errors",
    "Communicator": "communicator",
    "DivergenceError": "errors",
    "Exchange": "buffers.symmetric",
    "Facts": "facts",
    "InputError": "errors",
    "K3CommError": "errors",
    "KernelError": "errors",
    "LatentMoESpec": "spec",
    "MoETail": "moe_tail",
    "MoETailOp": "operations",
    "NegotiationError": "errors",
    "Numerics": "tiers",
    "ParallelLayout": "spec",
    "PeerTimeoutError": "errors",
    "Plan": "tiers.interface",
    "PlanError": "errors",
    "RendezvousError": "errors",
    "RouteExchangeOp": "operations",
    "Settings": "settings",
    "SettingsError": "errors",
    "Tier": "tiers",
    "TierUnavailableError": "errors",
    "TopKPackOp": "operations",
    "Verdict": "facts",
    "WindowsError": "errors",
}

__all__ = [
    "AttentionReduceOp",
    "CaptureError",
    "ClosedError",
    "CommunicationTimeoutError",
    "Communicator",
    "DivergenceError",
    "Exchange",
    "Facts",
    "InputError",
    "K3CommError",
    "KernelError",
    "LatentMoESpec",
    "MoETail",
    "MoETailOp",
    "NegotiationError",
    "Numerics",
    "ParallelLayout",
    "PeerTimeoutError",
    "Plan",
    "PlanError",
    "RendezvousError",
    "RouteExchangeOp",
    "Settings",
    "SettingsError",
    "Tier",
    "TierUnavailableError",
    "TopKPackOp",
    "Verdict",
    "WindowsError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Communicator":
        import_module(f"{__name__}.ops")  # registers the operators that its handles call in compiled models
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
