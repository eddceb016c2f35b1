"""The shape of the package: what may import what, what importing does, what is public, and what a tier consists of.

The source is read, not run, so a rule holds for code that no test reaches too.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest

import k3comm
from k3comm import errors
from k3comm.tiers import Numerics, Tier, choose_windows, plugin, plugins

PACKAGE = Path(k3comm.__file__).parent
ROOT = PACKAGE.parent
PURE_TIERS = ("tier", "axes", "select", "windows")

# Lowest first. A module imports from its own layer and from lower ones.
LAYERS = (
    ("spec", "settings", "errors", "facts", "operations", "record", "tiers", *(f"tiers.{name}" for name in PURE_TIERS)),
    ("kernels",),
    ("buffers",),
    ("tiers.*",),
    ("negotiate",),
    ("uniform",),
    ("session", "streams"),
    ("checks", "communicator", "moe_tail", "attention_reduce", "route_exchange", "topk_pack"),
    ("ops",),
    ("testing",),
    ("cli", "__main__"),
)

PENDING = {Tier.MNNVL_CUTEDSL}
"""Tiers that are named, and have windows, but are not there yet. The list shrinks as they come."""

NAMED_ELSEWHERE = {"moe_tail.py": {"SEPARATE_REDUCE"}}
"""Members that a module other than the tier's own names: the overlap of the routed side is the last tier's."""

PUBLIC = [
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


# Reading the source


@attrs.frozen
class Import:
    """One import statement: the module that is imported, and where."""

    target: str
    line: int


def is_type_checking(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING") or (
        isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING"
    )


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that is run: less the bodies of `if TYPE_CHECKING`."""
    yield node
    skipped = node.body if isinstance(node, ast.If) and is_type_checking(node.test) else []
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from walk(child)


def imports(source: str, module: str, package: bool) -> Iterator[Import]:
    """What a module imports, also within functions and by name through `import_module`."""
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "k3comm":
            yield Import(f"k3comm.{node.attr}", node.lineno)


@cache
def modules() -> dict[str, Path]:
    """The modules of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("k3comm", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def home(target: str) -> str | None:
    """The module of the package that an imported name lives in; None if it is somebody else's.

    `k3comm` itself is lazy: a name of its surface counts as the module that it comes from.
    """
    if target.split(".")[0] != "k3comm":
        return None
    name = target.removeprefix("k3comm").removeprefix(".")
    if name in k3comm._MODULES:
        return f"k3comm.{k3comm._MODULES[name]}"
    while target not in modules():
        target = target.rpartition(".")[0]
    return target


def layer(module: str) -> int:
    """The place of a module in LAYERS; the lazy `k3comm` itself is at the bottom."""
    name = module.removeprefix("k3comm").removeprefix(".")
    if not name:
        return 0
    for number, entries in enumerate(LAYERS):
        if name in entries or (name.split(".")[0] in entries and not name.startswith("tiers.")):
            return number
    if name.startswith("tiers."):
        return next(number for number, entries in enumerate(LAYERS) if "tiers.*" in entries)
    raise AssertionError(f"{module} has no layer: give it one in LAYERS")


EACH_MODULE = pytest.mark.parametrize("module", sorted(modules()))
BOTTOM = sorted(module for module in modules() if layer(module) == 0)


def imports_of(module: str) -> list[Import]:
    path = modules()[module]
    return list(imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"))


def test_the_reader_sees_every_kind_of_import() -> None:
    source = """
import os.path, sys as system
from typing import TYPE_CHECKING
from .select import Axes
from . import windows
from ..errors import InputError
import k3comm
if TYPE_CHECKING:
    import secret
    from k3comm.ops import secret
else:
    import fallback
if typing.TYPE_CHECKING:
    import secret
def f():
    import k3comm.cli
    k3comm.Communicator
    import_module("k3comm.ops"), importlib.import_module("k3comm.testing"), __import__("k3comm.buffers")
try:
    import rich
except ImportError:
    pass
"""
    found = {entry.target for entry in imports(source, "k3comm.tiers.interface", False)}
    assert found == {
        "os.path", "sys", "typing.TYPE_CHECKING", "k3comm.tiers.select.Axes", "k3comm.tiers.windows",
        "k3comm.errors.InputError", "k3comm", "fallback", "k3comm.cli", "k3comm.Communicator", "k3comm.ops",
        "k3comm.testing", "k3comm.buffers", "rich",
    }  # fmt: skip
    within_a_package = {entry.target for entry in imports("from .a import b\nfrom .. import c", "k3comm.tiers", True)}
    assert within_a_package == {"k3comm.tiers.a.b", "k3comm.c"}


def test_names_are_found_at_home() -> None:
    assert home("torch.distributed") is None
    assert home("k3commander") is None
    assert home("k3comm.spec.LatentMoESpec") == "k3comm.spec"
    assert home("k3comm.LatentMoESpec") == "k3comm.spec"
    assert home("k3comm.Communicator") == "k3comm.communicator"
    assert home("k3comm.__version__") == "k3comm"
    assert home("k3comm.tiers.select.Agreement") == "k3comm.tiers.select"
    assert home("k3comm.tiers.Agreement") == "k3comm.tiers"
    values_to_tiers = ["spec", "kernels.dense", "buffers.symmetric", "tiers.interface"]
    order = [*values_to_tiers, "negotiate", "uniform", "session", "moe_tail", "ops", "testing", "cli.demo"]
    assert [layer(f"k3comm.{name}") for name in order] == list(range(len(LAYERS)))
    assert layer("k3comm.tiers.windows") == layer("k3comm.tiers") == layer("k3comm") == 0
    with pytest.raises(AssertionError, match="has no layer"):
        layer("k3comm.helpers")


# The rules


@EACH_MODULE
def test_imports_point_down(module: str) -> None:
    if module == "k3comm":
        found = imports_of(module)
        assert [entry.target for entry in found if entry.target.startswith("k3comm")] == [], "it is lazy"
        return
    mine = layer(module)
    upward = [
        f"line {entry.line}: {entry.target}"
        for entry in imports_of(module)
        if (target := home(entry.target)) is not None and layer(target) > mine
    ]
    assert upward == []


def test_every_layer_that_is_there_was_read() -> None:
    found = {layer(module) for module in modules()}
    assert {0, 1, 2, 3, 4, 5} <= found
    assert {f"k3comm.{name}" for name in ("spec", "settings", "errors", "facts", "operations", "tiers")} <= set(BOTTOM)


@pytest.mark.parametrize("module", [*BOTTOM, "k3comm.negotiate.decide"])
def test_pure_modules_import_nothing_heavy(module: str) -> None:
    heavy = {"torch", "numpy", "cuda", "pynvml", "rich", "matplotlib"}
    assert [entry for entry in imports_of(module) if entry.target.split(".")[0] in heavy] == []


def environment_reads(source: str) -> set[str]:
    """Where the environment is read or written, by name."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = set()
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in names | {"expandvars"}:
            found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix", "os.path", "posixpath"):
            found |= {alias.name for alias in node.names} & (names | {"expandvars"})
    return found


def test_reads_of_the_environment_are_seen() -> None:
    assert environment_reads("import os as o\ndef f():\n    return o.environ.get('X')") == {"environ"}
    assert environment_reads("from os import getenv as g, path") == {"getenv"}
    assert environment_reads("os.path.expandvars('$X'); os.environb") == {"expandvars", "environb"}
    assert environment_reads("environ = {}; environ['X']; def_ = os.path") == set()


@EACH_MODULE
def test_only_settings_reads_the_environment(module: str) -> None:
    found = environment_reads(modules()[module].read_text(encoding="utf-8"))
    assert found == ({"environ"} if module == "k3comm.settings" else set())


def pickling(source: str) -> set[str]:
    """What a module uses that runs code it receives, or that pickles between ranks."""
    packages = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    calls = re.compile(r"(all_)?gather_object|broadcast_object_list|scatter_object_list|(send|recv)_object_list")
    found = set()
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & packages
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & packages
            found |= {alias.name for alias in node.names if calls.fullmatch(alias.name)}
        elif isinstance(node, ast.Attribute) and calls.fullmatch(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in (("torch", "load"), ("torch", "save")):
                found.add(f"torch.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.add(node.func.id)
    return found


def test_pickling_is_seen() -> None:
    assert pickling("import pickle as p, json") == {"pickle"}
    assert pickling("from torch.distributed import all_gather_object, all_reduce") == {"all_gather_object"}
    assert pickling("dist.broadcast_object_list(x); dist.all_gather(y); torch.load(z)") == {
        "broadcast_object_list",
        "torch.load",
    }
    assert pickling("self.gather(x); model.eval(); eval(y)") == {"eval"}


@pytest.mark.parametrize("module", sorted(m for m in modules() if not m.startswith("k3comm.testing")))
def test_nothing_is_pickled(module: str) -> None:
    assert pickling(modules()[module].read_text(encoding="utf-8")) == set()


# What importing does


def in_a_new_process(program: str) -> Any:
    """What a program writes as JSON, run by a fresh interpreter."""
    result = subprocess.run([sys.executable, "-B", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


EFFECTS = """
import json, logging, os, signal, sys, threading, warnings

events = []
watched = ("ctypes.dlopen", "os.", "subprocess.", "socket.", "shutil.", "tempfile.", "signal.")
harmless = ("os.listdir", "os.scandir")

def hook(event, arguments):
    if event == "open" and arguments[1] is not None and set(str(arguments[1])) & set("wax+"):
        events.append(f"open {arguments[0]}")
    if event.startswith(watched) and event not in harmless:
        events.append(event)

def state():
    return [
        dict(os.environ), list(warnings.filters), list(logging.root.handlers), threading.active_count(),
        [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)], os.getcwd(), sys.path[:],
    ]

before = state()
sys.addaudithook(hook)
import MODULE
json.dump({"events": events, "unchanged": state() == before, "modules": sorted(sys.modules)}, sys.stdout)
"""


@pytest.mark.parametrize("module", ["k3comm", "k3comm.tiers", "k3comm.settings", "k3comm.spec", "k3comm.operations"])
def test_importing_has_no_side_effects(module: str) -> None:
    """No torch, no driver, no library loaded by hand, no process, socket or file, and the process is as it was."""
    result = in_a_new_process(EFFECTS.replace("MODULE", module))
    assert module in result["modules"]
    heavy = ("torch", "numpy", "cuda", "pynvml", "rich", "matplotlib", "multiprocessing")
    assert [name for name in result["modules"] if name.split(".")[0] in heavy] == []
    assert result["events"] == []
    assert result["unchanged"]


def test_side_effects_are_seen() -> None:
    result = in_a_new_process(
        EFFECTS.replace("import MODULE", "import ctypes; ctypes.CDLL(None); os.environ['X'] = ''")
    )
    assert "ctypes.dlopen" in result["events"]
    assert not result["unchanged"]


def test_the_pure_parts_work_with_no_torch_installed() -> None:
    program = """
import json, sys
sys.modules["torch"] = None
import k3comm
import k3comm.negotiate.decide
from k3comm import LatentMoESpec, MoETailOp, ParallelLayout, Settings
from k3comm.facts import Facts
from k3comm.tiers import Agreement, Axes, Tier, choose_windows, select_tier
LatentMoESpec.kimi_k3(), ParallelLayout(), MoETailOp(), Settings.from_env(environ={})
windows = choose_windows(Facts(host="here", device="cpu").family, 2).windows
print(json.dumps(select_tier(axes=Axes(num_tokens=16), agreement=Agreement.of(Tier), windows=windows).name))
"""
    assert in_a_new_process(program) == "TAIL_FUSION"


def test_the_whole_package_leaves_the_gpu_alone() -> None:
    """Everything that is public can be had without a driver being asked for anything."""
    program = """
import json
import torch

asked = []
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, lambda *arguments, name=name: asked.append(name) or 0)
import k3comm
for name in k3comm.__all__:
    getattr(k3comm, name)
imported_asks = list(asked)
torch.cuda.is_available()
print(json.dumps([imported_asks, asked, torch.distributed.is_initialized()]))
"""
    assert in_a_new_process(program) == [[], ["is_available"], False]


# What is public


def test_public_surface() -> None:
    assert sorted(k3comm.__all__) == PUBLIC
    assert sorted(k3comm._MODULES) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name: str) -> None:
    value = getattr(k3comm, name)
    assert value.__name__ == name
    assert value.__doc__
    assert value.__module__ == f"k3comm.{k3comm._MODULES[name]}" or value.__module__.startswith("k3comm.tiers.")


def test_dir_shows_the_surface() -> None:
    for _ in range(2):
        shown = dir(k3comm)
        assert set(PUBLIC) <= set(shown)
        assert len(shown) == len(set(shown))
        assert [name for name in PUBLIC if getattr(k3comm, name) is None] == []


def test_the_type_checker_sees_the_same_surface() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and is_type_checking(node.test)]
    seen = {
        alias.asname or alias.name: (node.module or "").removeprefix("k3comm.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == k3comm._MODULES
    assert (PACKAGE / "py.typed").is_file()


def test_what_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"^module 'k3comm' has no attribute 'Comm'$"):
        k3comm.Comm  # noqa: B018
    with pytest.raises(ImportError, match="Comm"):
        exec("from k3comm import Comm")


def test_star_import() -> None:
    names: dict[str, Any] = {}
    exec("from k3comm import *", names)
    assert sorted(set(names) - {"__builtins__"}) == PUBLIC
    assert not set(PUBLIC) & set(dir(builtins))


def test_every_error_is_drawn_in_the_tree() -> None:
    drawn: dict[str, tuple[str, ...]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([| `-]*)(\w+)(?: \((\w+)\))?(?:\s+\S|$)", line)
        if match:
            depth, name, builtin = len(match[1]), match[2], match[3]
            above[depth] = name
            parents = [above[d] for d in sorted(above) if d < depth][-1:]
            drawn[name] = (*parents, *([builtin] if builtin else [])) or ("Exception",)
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert drawn == {name: tuple(base.__name__ for base in kind.__bases__) for name, kind in kinds.items()}
    assert set(drawn) == {name for name in PUBLIC if name.endswith("Error")}


# What a tier consists of


def test_tiers_still_to_come_are_listed() -> None:
    for tier in PENDING:
        assert not (PACKAGE / "tiers" / f"{tier.name.lower()}.py").exists(), f"take {tier.name} off PENDING"
        assert plugin(tier) is None
    assert list(plugins()) == [tier for tier in Tier if tier not in PENDING]


@pytest.mark.parametrize("tier", [tier for tier in Tier if tier not in PENDING], ids=lambda tier: tier.name)
def test_tier(tier: Tier) -> None:
    from k3comm.tiers.interface import TailTier

    found = plugin(tier)
    assert found is not None
    assert found.__module__ == f"k3comm.tiers.{tier.name.lower()}"
    assert issubclass(found, TailTier)
    assert not getattr(found, "__abstractmethods__", None)
    assert found.name is tier
    assert isinstance(found.numerics, Numerics)
    assert found.transports <= {"multicast", "peer", "host", "library"}
    assert found.transports
    assert (sys.modules[found.__module__].__doc__ or "").strip()


def test_a_plugin_stands_in_its_own_module() -> None:
    """A module that defines `Plugin` under a name that no member has would never be found."""
    plugged = set()
    for path in (PACKAGE / "tiers").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == "Plugin":
                plugged.add(path.stem)
    assert plugged == {tier.name.lower() for tier in Tier if tier not in PENDING}


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.name)
def test_tier_has_a_row_in_the_default_windows(tier: Tier) -> None:
    assert tier in choose_windows("default", 8).windows.rows


def test_tiers_for_the_host_have_a_row_in_its_windows() -> None:
    """Those with a library or a host path. The other two need multicast."""
    rows = choose_windows("host", 2).windows.rows
    assert set(rows) == set(Tier) - {Tier.MNNVL_CUTEDSL, Tier.MULTIMEM_AR}
    for tier, found in plugins().items():
        assert (tier in rows) == bool(found.transports & {"host", "library"})


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.name)
def test_tier_has_a_row_in_the_documentation(tier: Tier) -> None:
    page = ROOT / "docs" / "tiers.md"
    assert page.is_file(), "docs/tiers.md lists the tiers"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("|")]
    first_cells = [row.strip().strip("|").split("|")[0].strip(" `*") for row in rows]
    assert tier.name in first_cells


@EACH_MODULE
def test_a_tier_is_named_by_nobody_else(module: str) -> None:
    """A new tier is one file: whatever depends on a member by name elsewhere would have to be told of it."""
    path = modules()[module]
    named = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Tier"
        and node.attr in Tier.__members__
    }
    own = {path.stem.upper()} if path.parent == PACKAGE / "tiers" else set()
    assert named <= own | NAMED_ELSEWHERE.get(str(path.relative_to(PACKAGE)), set())


def test_no_tiers_module_collides_with_a_pure_one() -> None:
    names = [tier.name.lower() for tier in Tier]
    assert len(set(names)) == len(names)
    assert not {*names} & {*PURE_TIERS, "interface", "library"}
