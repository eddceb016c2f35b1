"""What the operator wants. The only module that reads the environment, once, at negotiate.

Precedence of each setting by itself: argument, environment, windows file (its `[settings]` table), default.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import attrs

from k3comm.errors import SettingsError
from k3comm.tiers.tier import Tier
from k3comm.tiers.windows import by_key

PREFIX = "K3COMM_"

UNIFORM_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NVSHMEM_DISABLE_NVLS",
    "TORCH_SYMMMEM",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
)
"""Variables of other libraries that decide how ranks reach one another; a rank on which one differs is an error."""

LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables of other libraries that are a fact of one process, and may differ."""


def _tier(value: Any) -> Tier:
    if isinstance(value, Tier):
        return value
    name = str(value).strip().upper()
    if name not in Tier.__members__:
        raise SettingsError(f"no tier is called {str(value).strip()!r}; accepted are {', '.join(Tier.__members__)}")
    return Tier[name]


def _tiers(value: Any) -> frozenset[Tier]:
    names: Iterable[Any] = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise SettingsError(f"{value!r} given; accepted are tiers, or their names separated by commas or blanks")
    return frozenset(_tier(name) for name in names if name != "")


def _disabled(value: Any) -> frozenset[Tier]:
    tiers = _tiers(value)
    last = max(Tier)
    if last in tiers:
        raise SettingsError(f"{last.name} can't be disabled: it takes what no other tier does")
    return tiers


def _one_of(*accepted: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if str(value).strip().lower() not in accepted:
            raise SettingsError(f"{value!r} given; accepted are {', '.join(accepted)}")
        return str(value).strip().lower()

    return parse


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "on", "true", "yes"):
        return True
    if word in ("0", "off", "false", "no"):
        return False
    raise SettingsError(f"{value!r} given; accepted are on, off, 1, 0, true, false, yes, no")


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, bool) or not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise SettingsError(f"{value!r} given; accepted are seconds from {MIN_SECONDS} to {MAX_SECONDS}")
    return seconds


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        text = value.strip() if isinstance(value, str) else str(value) if type(value) is int else ""
        # Three digits at most: int() takes seconds for a text of millions, and refuses one of thousands.
        if not (text.isascii() and text.isdigit() and len(text) <= 3 and least <= int(text) <= most):
            raise SettingsError(f"{value!r} given; accepted are whole numbers from {least} to {most}")
        return int(text)

    return parse


def _text(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        raise SettingsError(f"{value!r} given; accepted is a text that is not empty")
    return text


MIN_SECONDS = 0.001
"""The shortest deadline: time-outs travel as whole milliseconds."""
MAX_SECONDS = 86400
"""The longest deadline: a day. Time-outs travel as milliseconds in 32 bits in some backends."""
MAX_OVERLAP_SMS = 32
"""The most SMs of an overlapped all-reduce: what every NCCL since 2.17 takes as maxCTAs (64 from 2.25 on)."""


def _setting(
    env: str,
    default: Any,
    parse: Callable[[Any], Any],
    *,
    uniform: bool = True,
    none: str = "",
) -> Any:
    """A field: None at construction means "not given".

    `uniform`: the ranks must have the same value; `none`: the word for the value None.
    """
    metadata = {
        "env": PREFIX + env,
        "default": default,
        "parse": parse,
        "uniform": uniform,
        "none": none,
    }
    return attrs.field(default=None, metadata=metadata)


@attrs.frozen(kw_only=True)
class Settings:
    """What the operator wants; every field may be left out.

    Attributes:
        disabled: tiers that are not to be used (K3COMM_DISABLE: names, separated by commas or blanks).
        enabled: tiers that are off unless asked for (K3COMM_ENABLE).
        force: use this tier always, or raise at negotiate; None, or "auto", selects (K3COMM_FORCE).
        transport: "auto", "multicast", "peer" or "host" (K3COMM_TRANSPORT).
        windows: path of a windows file of your own; None takes the packaged ones (K3COMM_WINDOWS).
        pdl: programmatic dependent launch where it is supported (K3COMM_PDL).
        vote_deadline: seconds that a collective of the negotiation may take (K3COMM_VOTE_DEADLINE).
        rendezvous_deadline: seconds that a stage of making shared memory may take (K3COMM_RENDEZVOUS_DEADLINE).
        poll_deadline: seconds that a forward waits on a peer, on CPU and in our own kernels (K3COMM_POLL_DEADLINE).
        overlap_sms: SMs that NCCL may take for a shared sum that is begun early (`MoETail.reduce_shared`), over a
            communicator of its own, 1 to 32; None, or "off", uses the group's own one. Without NCCL it changes nothing
            (K3COMM_OVERLAP_SMS).
        check_uniform: compare what the ranks do, call by call (K3COMM_CHECK_UNIFORM).
        allow_shared_device: several ranks on one GPU are meant (K3COMM_ALLOW_SHARED_DEVICE).
        record: folder of the decision recorder, a file a rank; None is off (K3COMM_RECORD).
        host_identity: what to call this machine; None detects it (K3COMM_HOST_IDENTITY).
        cache_dir: folder of compiled kernels; None is the user's cache folder (K3COMM_CACHE_DIR).
        sources: where each value comes from: "argument", the variable's name, the windows file's name, or "default".

    `Settings(...)` reads no environment; `Settings.from_env` does, and so does `Communicator.negotiate`.

    Raises:
        SettingsError: a malformed value; names the setting, the value and what is accepted.
    """

    disabled: AbstractSet[Tier | str] = _setting("DISABLE", frozenset(), _disabled)
    enabled: AbstractSet[Tier | str] = _setting("ENABLE", frozenset(), _tiers)
    force: Tier | str | None = _setting("FORCE", None, _tier, none="auto")
    transport: str = _setting("TRANSPORT", "auto", _one_of("auto", "multicast", "peer", "host"))
    windows: str | os.PathLike[str] | None = _setting("WINDOWS", None, _text, uniform=False, none="packaged")
    pdl: bool = _setting("PDL", True, _flag)
    vote_deadline: float = _setting("VOTE_DEADLINE", 60.0, _seconds)
    rendezvous_deadline: float = _setting("RENDEZVOUS_DEADLINE", 600.0, _seconds)
    poll_deadline: float = _setting("POLL_DEADLINE", 30.0, _seconds)
    overlap_sms: int | None = _setting("OVERLAP_SMS", None, _whole(1, MAX_OVERLAP_SMS), none="off")
    check_uniform: bool = _setting("CHECK_UNIFORM", False, _flag)
    allow_shared_device: bool = _setting("ALLOW_SHARED_DEVICE", False, _flag)
    record: str | os.PathLike[str] | None = _setting("RECORD", None, _text, uniform=False, none="off")
    host_identity: str | None = _setting("HOST_IDENTITY", None, _text, uniform=False, none="detected")
    cache_dir: str | os.PathLike[str] | None = _setting("CACHE_DIR", None, _text, uniform=False, none="default")
    sources: Mapping[str, str] = attrs.field(factory=dict, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        sources = {}
        for field in _fields():
            given = getattr(self, field.name)
            source = "default" if given is None else self.sources.get(field.name, "argument")
            if source == "default" and given is not None and given != field.metadata["default"]:
                source = "argument"  # a changed copy (attrs.evolve)
            sources[field.name] = source
            value = field.metadata["default"] if given is None else _parse(field, given, source)
            object.__setattr__(self, field.name, value)
        object.__setattr__(self, "sources", by_key(sources))

    @classmethod
    def from_env(cls, settings: Settings | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Fills what `settings` leaves out from the environment.

        Args:
            settings: what was given as arguments; these win.
            environ: the environment; the process's own by default.

        Raises:
            SettingsError: a malformed variable, or one with the prefix K3COMM_ that does not exist.
        """
        environ = os.environ if environ is None else environ
        names = {field.metadata["env"]: field.name for field in _fields()}
        for variable in sorted(environ):
            if variable.startswith(PREFIX) and variable not in names:
                # Without the prefix, which would make every variable resemble every other one.
                ends = [name.removeprefix(PREFIX) for name in names]
                near = difflib.get_close_matches(variable.removeprefix(PREFIX).upper(), ends, 1)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else f"accepted are {', '.join(names)}"
                raise SettingsError(f"{variable}: there is no such variable; {hint}")
        values = {name: environ[env] for env, name in names.items() if environ.get(env, "") != ""}
        for field in _fields():
            if field.name in values:  # also where an argument wins: a malformed variable is an error
                _parse(field, values[field.name], field.metadata["env"])
        return (settings or cls())._filled(values, {name: env for env, name in names.items()})

    def with_file(self, values: Mapping[str, Any], source: str) -> Settings:
        """Fills what arguments and environment leave out from a windows file's `[settings]` table."""
        # Not these two: the file is found by the one, and the other names a machine, not a kind of machine.
        accepted = [field.name for field in _fields() if field.name not in ("windows", "host_identity")]
        for name in values:
            if name not in accepted:
                raise SettingsError(
                    f"{source}: [settings] {name}: not a setting of a windows file; accepted are {', '.join(accepted)}"
                )
        return self._filled(values, dict.fromkeys(values, source))

    def _filled(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
        merged, origin = dict(values), {name: sources[name] for name in values}
        for name, source in self.sources.items():
            if source != "default":
                value = getattr(self, name)
                word = getattr(attrs.fields(Settings), name).metadata["none"]
                merged[name], origin[name] = word if value is None else value, source
        return Settings(**merged, sources=origin)

    def describe(self, *, uniform_only: bool = False) -> dict[str, str]:
        """Each value as text, by name; with `uniform_only` those on which all ranks must agree."""
        fields = [f for f in _fields() if f.metadata["uniform"] or not uniform_only]
        return {f.name: _show(getattr(self, f.name), f.metadata["none"]) for f in fields}


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of UNIFORM_VARIABLES and LOCAL_VARIABLES that are set; of the process's own environment by default."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in (*UNIFORM_VARIABLES, *LOCAL_VARIABLES) if name in environ}


def user_cache_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """What `cache_dir` stands for when nobody gives it: `k3comm` in the user's cache folder.

    That is XDG_CACHE_HOME, if it is an absolute path (the XDG base directory specification ignores others), or
    ~/.cache. None where the user has no home.
    """
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".cache")
    return os.path.join(base, "k3comm")


def vote_deadline(settings: object) -> float:
    """The deadline of a vote by a rank whose settings as a whole are not to be had; what can be read of it counts."""
    given = settings if isinstance(settings, Settings) else Settings()
    try:
        return Settings.from_env(given).vote_deadline
    except SettingsError:
        return given.vote_deadline


def launched(environ: Mapping[str, str] | None = None) -> tuple[int, int, int] | None:
    """Rank, world size and local rank (0 where it is not said) of a job such as torchrun's; None outside of one.

    Raises:
        SettingsError: a variable of the launcher that is malformed, or there without its counterpart.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    found = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environ.get(name, "0" if name == "LOCAL_RANK" else "")
        if not (text.isascii() and text.isdigit()):
            raise SettingsError(f"{name}: {text!r} given; accepted are whole numbers, as torchrun sets them")
        found.append(int(text))
    rank, size, local = found
    if rank >= size:
        raise SettingsError(f"RANK: {rank} given with WORLD_SIZE={size}; accepted are 0 to {size - 1}")
    return rank, size, local


def meeting_place(environ: Mapping[str, str] | None = None) -> tuple[str, int, bool]:
    """Where the ranks of a job meet: address, port, and whether the launcher itself keeps the store there.

    Raises:
        SettingsError: a variable of the launcher that is missing or malformed.
    """
    environ = os.environ if environ is None else environ
    address, port = (environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address:
        raise SettingsError("MASTER_ADDR: nothing given; accepted are the name or the address of rank 0's host")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise SettingsError(f"MASTER_PORT: {port!r} given; accepted are whole numbers from 1 to 65535")
    return address, int(port), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def quiet_torch() -> None:
    """Unless TORCH_CPP_LOG_LEVEL is set, a torch that is loaded later in this process logs no errors of its C++ part.

    For commands: what it logs it also raises, and the log has a page of places in C++ for each line.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def _fields() -> list[attrs.Attribute[Any]]:
    return [field for field in attrs.fields(Settings) if "env" in field.metadata]


def _parse(field: attrs.Attribute[Any], value: Any, source: str) -> Any:
    word = field.metadata["none"]
    if word and isinstance(value, str) and value.strip().lower() == word:
        return None
    try:
        return field.metadata["parse"](value)
    except SettingsError as error:
        place = field.name if source == "argument" else f"{source} ({field.name})"
        raise SettingsError(f"{place}: {error}") from None


def _show(value: Any, none: str) -> str:
    if isinstance(value, Tier):
        return value.name
    if isinstance(value, frozenset):
        return ", ".join(tier.name for tier in sorted(value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return none if value is None else str(value)
