"""CUDA C++ to machine code, by NVRTC: for a named architecture, without a GPU or a driver, and once.

**A kernel is a stem**: `<name>.cu` holds the device code and `<name>.py`, next to it, what the host knows about it.
That module has a function `variants()`; `all_variants()` here walks the folder, so a new kernel needs no line anywhere
else, and the unit tests compile every variant for every architecture that it names.

**A variant is a set of macros.** Entry points are `extern "C"` and constants come as `-D`: the cubin then holds just
the one instance, under a name that needs no mangling, and the cache's key needs no list of instantiations.

**One compilation gives the cubin and the PTX.** From the PTX, whose grammar is documented, come the sizes of the
entry's parameters, so that `launch.py` packs what the device will read, and whether it uses multicast; from the
assembler's report (`--ptxas-options=-v`) come registers and spills. Neither needs a driver; cuda.core's own
`compile("ptx")` does.

**The cache** is in memory and on disk. Its key is a hash over everything that the result depends on: source, macros,
options, architecture, NVRTC's version and the content of every header that may be included, found by following
`#include` through the folders that NVRTC gets (without evaluating conditions: a header too many does no harm). An entry
is one file with a checksum, written beside its place and renamed into it, so readers see all of it or nothing, whoever
else writes. A damaged entry is compiled again. A folder that can't be written is no error: one warning.

CUDA's own headers are looked for by cuda.pathfinder (the wheel `nvidia-cuda-runtime`, conda, CUDA_HOME, the system).
`<cooperative_groups.h>` and `<cuda/atomic>` are not for kernels here: they cost 1.3 s and 80 KB each, where a kernel in
plain PTX takes 0.1 s; `griddepcontrol` and `multimem` need no header.

Nothing is compiled while a CUDA graph is captured.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch

from k3comm.errors import CaptureError, InputError, KernelError
from k3comm.settings import Settings, user_cache_folder

FOLDER = Path(__file__).parent
"""Where the kernels lie; the include path of their own headers too."""

ARCHITECTURES: Mapping[tuple[int, int], str] = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}
"""Compute capability -> architecture to compile for. With the suffix "a" (wgmma, TMA), which runs on just that one."""

SHARED_LIMITS: Mapping[str, int] = {
    "sm_90a": 227 * 1024,
    "sm_100a": 227 * 1024,
    "sm_103a": 227 * 1024,
    "sm_120a": 99 * 1024,
}
"""Shared memory that a block may have, in bytes (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""

OPTIONS: Mapping[str, Any] = {"std": "c++17", "ptxas_options": "-v"}
"""What every kernel is compiled with, as arguments of cuda.core's ProgramOptions."""

FORMAT = b"k3comm kernel 1\n"
"""How an entry on disk begins; the number is stepped when its layout changes."""

_log = logging.getLogger(__name__)


def arch_of(compute_capability: tuple[int, int]) -> str:
    """The architecture to compile for, of a device with this compute capability.

    Raises:
        InputError: no kernel is made for it; names those that there are.
    """
    if compute_capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise InputError(f"compute capability {'.'.join(map(str, compute_capability))}: kernels are made for {known}")
    return ARCHITECTURES[compute_capability]


def refuse_capture(what: str) -> None:
    """Raises CaptureError if a CUDA graph is being captured on torch's current stream."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what} while a CUDA graph is captured: kernels are prepared at negotiate, before any capture"
        )


# What is compiled


def _defines(values: Mapping[str, int | str] | Iterable[tuple[str, int | str]]) -> tuple[tuple[str, str], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return tuple(sorted((name, str(int(v) if isinstance(v, bool) else v)) for name, v in pairs))


def _architectures(instance: KernelVariant, attribute: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for arch in value:
        _check_arch(arch)


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES.values():
        raise InputError(f"architecture {arch!r} given; accepted are {', '.join(ARCHITECTURES.values())}")


@attrs.frozen(kw_only=True)
class KernelVariant:
    """One kernel as it may be compiled.

    Attributes:
        name: what errors, records and tests call it; unique in the package.
        source: the file's name in `folder`.
        entry: the `extern "C"` name of the `__global__` function.
        defines: macros and their values (True and False become 1 and 0).
        archs: the architectures that it is made for.
        registers: the most that it may use, in all or by architecture; the unit tests hold it to that.
        transport: "peer" (it must not use `multimem`), "multicast" (it must), or None (it talks to nobody, likewise
            without).
        folder: where the source lies, which is an include path as well.
    """

    name: str
    source: str
    entry: str
    defines: Mapping[str, int | str] | tuple[tuple[str, str], ...] = attrs.field(default=(), converter=_defines)
    archs: tuple[str, ...] = attrs.field(
        default=tuple(ARCHITECTURES.values()), converter=tuple, validator=_architectures
    )
    registers: int | Mapping[str, int] = attrs.field(default=255, hash=False)
    transport: str | None = attrs.field(default=None, validator=attrs.validators.in_((None, "peer", "multicast")))
    folder: Path = attrs.field(default=FOLDER, repr=False)

    def max_registers(self, arch: str) -> int:
        """The most registers a thread that it may use on `arch`."""
        return self.registers if isinstance(self.registers, int) else self.registers[arch]


def all_variants() -> tuple[KernelVariant, ...]:
    """Every variant of every kernel of the package: what the modules beside the `.cu` files declare.

    Raises:
        KernelError: two variants of the same name.
    """
    found: dict[str, KernelVariant] = {}
    for source in sorted(FOLDER.glob("*.cu")):
        for variant in import_module(f"{__package__}.{source.stem}").variants():
            if variant.name in found:
                raise KernelError(f"{source.name}: two variants are called {variant.name}")
            found[variant.name] = variant
    return tuple(found.values())


# What comes out


@attrs.frozen
class Param:
    """One parameter of an entry: bytes, alignment, and "u64", "f32", ... or "b8" for a struct or array of bytes."""

    size: int
    align: int
    kind: str


@attrs.frozen(kw_only=True)
class CompiledKernel:
    """A kernel in machine code, not loaded anywhere. Never a cuda.core object, whose repr() needs a driver.

    Attributes:
        name: the variant's. entry: the symbol in the cubin. arch: the only architecture that it runs on.
        cubin: the machine code. ptx: what it was assembled from.
        key: the hash of everything that it depends on.
        params: the entry's parameters.
        registers: a thread's.
        stack: bytes a thread; without spills it is an array indexed at run time.
        spill_stores, spill_loads: bytes a thread; None where the compiler did not say.
        shared: bytes of static shared memory a block.
        max_threads, min_blocks: the launch bounds (`__launch_bounds__`); None where the source gives none.
        uses_multimem: whether the PTX holds a `multimem` instruction.
        seconds: what the compilation took.
    """

    name: str
    entry: str
    arch: str
    cubin: bytes = attrs.field(repr=False)
    ptx: str = attrs.field(repr=False)
    key: str = attrs.field(repr=False)
    params: tuple[Param, ...]
    registers: int
    spill_stores: int | None
    spill_loads: int | None
    stack: int
    shared: int
    max_threads: int | None
    min_blocks: int | None
    uses_multimem: bool
    seconds: float = attrs.field(eq=False)

    @property
    def spills(self) -> int | None:
        """Bytes a thread that are spilled, stored and loaded; None where the compiler did not say."""
        return None if self.spill_stores is None or self.spill_loads is None else self.spill_stores + self.spill_loads


@attrs.define
class Counts:
    """How often a kernel was compiled, found in memory, and found on disk, in this process."""

    compiled: int = 0
    in_memory: int = 0
    on_disk: int = 0


counts = Counts()
_memory: dict[str, CompiledKernel] = {}
_lock = threading.Lock()


def compile_kernel(variant: KernelVariant, arch: str, settings: Settings | None = None) -> CompiledKernel:
    """Compiles a variant for an architecture, or finds it in the cache. Needs neither a GPU nor a driver.

    Args:
        arch: one of `variant.archs`; never taken from a current device (`arch_of` says which).
        settings: `cache_dir` counts; None takes the defaults.

    Raises:
        InputError: the variant isn't made for `arch`.
        KernelError: NVRTC refused it (with its log, which names file and line), or NVRTC or CUDA's headers are missing.
        CaptureError: a CUDA graph is being captured.
    """
    refuse_capture(f"{variant.name} would be compiled")
    _check_arch(arch)
    if arch not in variant.archs:
        raise InputError(f"{variant.name}: {arch} given; it is made for {', '.join(variant.archs)}")
    settings = Settings() if settings is None else settings
    place = user_cache_folder() if settings.cache_dir is None else os.fspath(settings.cache_dir)
    folder = None if place is None else Path(place).expanduser()
    with _lock:
        key = cache_key(variant, arch)
        if key in _memory:
            counts.in_memory += 1
        elif (found := _read(folder, key)) is not None:
            counts.on_disk += 1
            _memory[key] = found
        else:
            made = _compile(variant, arch, key)
            counts.compiled += 1
            _memory[key] = made
            _publish(folder, made)
        # The key leaves out what names don't change: another variant may have the same macros.
        return attrs.evolve(_memory[key], name=variant.name)


def to_ptx(variant: KernelVariant, arch: str, settings: Settings | None = None) -> str:
    """The PTX of a variant, for inspection. Arguments and errors: as `compile_kernel`."""
    return compile_kernel(variant, arch, settings).ptx


# The compiler


@cache
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's own version, such as (13, 0).

    Raises:
        KernelError: there is no NVRTC.
    """
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as problem:  # cuda.pathfinder's own error is a RuntimeError
        raise KernelError(
            f"kernels are compiled by NVRTC, which can't be loaded ({problem}); torch for CUDA brings it, or install "
            "nvidia-cuda-nvrtc"
        ) from problem
    if int(error) != 0:
        raise KernelError(f"nvrtcVersion failed: {error}")
    return int(major), int(minor)


@cache
def cuda_headers() -> Path:
    """The folder with CUDA's own headers.

    Raises:
        KernelError: there is none.
    """
    import cuda.pathfinder

    found = cuda.pathfinder.find_nvidia_header_directory("cudart")
    if found is None:
        raise KernelError(
            "CUDA's headers (cuda_bf16.h) are not found in site-packages, conda, CUDA_HOME or the system's folders; "
            "torch for CUDA brings them, or install nvidia-cuda-runtime"
        )
    return Path(found)


def _compile(variant: KernelVariant, arch: str, key: str) -> CompiledKernel:
    from cuda.bindings import nvrtc
    from cuda.core import Program, ProgramOptions

    path = variant.folder / variant.source
    options = ProgramOptions(
        name=variant.source,
        arch=arch,
        define_macro=list(variant.defines) or None,
        include_path=[str(variant.folder), str(cuda_headers())],
        **OPTIONS,
    )
    log, start = io.StringIO(), time.perf_counter()
    try:
        program = Program(path.read_text(encoding="utf-8"), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as problem:  # cuda.core's class for a compiler's error is private
        text = str(problem).replace("\0", "").strip()
        raise KernelError(f"{variant.name} does not compile for {arch}: {text}") from problem
    error, size = nvrtc.nvrtcGetPTXSize(program.handle)
    buffer = bytearray(size)
    if int(error) == 0:
        (error,) = nvrtc.nvrtcGetPTX(program.handle, buffer)
    if int(error) != 0:
        raise KernelError(f"{variant.name} for {arch}: no PTX: {error}")
    seconds = time.perf_counter() - start
    program.close()
    ptx = bytes(buffer).decode().rstrip("\0")
    return CompiledKernel(
        name=variant.name,
        entry=variant.entry,
        arch=arch,
        cubin=cubin,
        ptx=ptx,
        key=key,
        seconds=seconds,
        **_from_ptx(ptx, variant.name, variant.entry),
        **(_from_log(log.getvalue(), variant.entry) or _from_cubin(cubin, variant.name, variant.entry)),
    )


_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z])(\d+)[^,\[]*(?:\[(\d+)\])?")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def _from_ptx(ptx: str, name: str, entry: str) -> dict[str, Any]:
    """Parameters and launch bounds of an entry (PTX ISA, "Kernel Function Parameter Attributes" and performance-tuning
    directives)."""
    head = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\(([^)]*)\))?([^{{]*)\{{", ptx)
    if head is None:
        raise KernelError(f'{name}: {entry} is not an extern "C" __global__ function of the source')
    params = []
    for match in _PARAM.finditer(head[1] or ""):
        align, letter, bits, count = match.groups()
        width = int(bits) // 8
        params.append(Param(width * int(count or 1), int(align or width), f"{letter}{bits}"))
    threads = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head[2])
    blocks = re.search(r"\.minnctapersm\s+(\d+)", head[2])
    return {
        "params": tuple(params),
        "max_threads": None if threads is None else _product(int(n or 1) for n in threads.groups()),
        "min_blocks": None if blocks is None else int(blocks[1]),
        # Inline assembly keeps its comments.
        "uses_multimem": re.search(r"\bmultimem\.", _COMMENT.sub("", ptx)) is not None,
    }


def _product(numbers: Iterable[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _from_log(log: str, entry: str) -> dict[str, Any] | None:
    """Registers, spills and shared memory of an entry, from the assembler's report; None where it made none.

    Seen once on a machine with a GPU (NVRTC 13.0, cuda-core 1.2.0), where a later process got its reports.
    """
    for part in log.split("Compiling entry function")[1:]:
        used = re.search(r"Used (\d+) registers", part)
        if used is None or not part.lstrip().startswith(f"'{entry}'"):
            continue
        # Functions that are not inlined have lines of their own.
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if frames:
            stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
            return {
                "registers": int(used[1]),
                "stack": stack,
                "spill_stores": stores,
                "spill_loads": loads,
                "shared": int(shared[1]) if shared else 0,
            }
    return None


_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info, as `cuobjdump -elf` names them: EIATTR_REGCOUNT, _FRAME_SIZE


def _from_cubin(cubin: bytes, name: str, entry: str) -> dict[str, Any]:
    """The same from the cubin, an ELF file of 64 bits, which knows the frame but not how much of it are spills."""
    sections = _sections(cubin)
    symbols, names = sections[".symtab"], sections[".strtab"]
    found: dict[int, int] = {}
    for at in range(0, len(symbols), 24):
        start = int.from_bytes(symbols[at : at + 4], "little")
        if names[start : names.index(b"\0", start)] == entry.encode():
            info, place = sections[".nv.info"], 0
            while place < len(info):
                form, attribute = info[place], info[place + 1]
                size = int.from_bytes(info[place + 2 : place + 4], "little")
                payload = info[place + 4 : place + 4 + size] if form == 4 else b""
                if len(payload) == 8 and int.from_bytes(payload[:4], "little") == at // 24:
                    found[attribute] = int.from_bytes(payload[4:], "little")
                place += 4 + len(payload)
    if _REGISTERS not in found:
        raise KernelError(f"{name}: neither the assembler's report nor the cubin tell the registers of {entry}")
    return {
        "registers": found[_REGISTERS],
        "stack": found.get(_FRAME, 0),
        "spill_stores": None,
        "spill_loads": None,
        "shared": _section_sizes(cubin).get(f".nv.shared.{entry}", 0),
    }


def _headers(elf: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Name, type, offset and size of every section."""
    start, each, count, at_names = (
        int.from_bytes(elf[40:48], "little"),
        *(int.from_bytes(elf[n : n + 2], "little") for n in (58, 60, 62)),
    )
    rows = [struct.unpack_from("<IIQQQQ", elf, start + number * each) for number in range(count)]
    names = elf[rows[at_names][4] :]
    for name, kind, _, _, offset, size in rows:
        yield names[name : names.index(b"\0", name)].decode(), kind, offset, size


def _sections(elf: bytes) -> dict[str, bytes]:
    return {name: elf[offset : offset + size] for name, _, offset, size in _headers(elf)}


def _section_sizes(elf: bytes) -> dict[str, int]:
    return {name: size for name, _, _, size in _headers(elf)}


# The key


_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)


@cache
def _content(path: Path, size: int, changed: int) -> tuple[str, tuple[tuple[bool, str], ...]]:
    """A file's hash, and what it includes: whether in quotes, and the name.

    `size` and `changed` tell versions of the file apart.
    """
    data = path.read_bytes()
    names = tuple((kind == b'"', name.decode(errors="replace")) for kind, name in _INCLUDE.findall(data))
    return hashlib.sha256(data).hexdigest(), names


def headers_of(source: Path, folders: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Names and hashes of a source and of all that it may include, however deep; a name that is nowhere has no hash."""
    folders = list(folders)
    seen: set[Path] = set()
    missing: set[str] = set()
    waiting = [(source.name, source)]
    while waiting:
        name, path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        stat = path.stat()
        digest, names = _content(path, stat.st_size, stat.st_mtime_ns)
        yield name, digest
        for quoted, inner in names:
            places = [path.parent, *folders] if quoted else folders
            found = next((place / inner for place in places if (place / inner).is_file()), None)
            if found is not None:
                waiting.append((inner, found))
            elif inner not in missing:
                missing.add(inner)
                yield inner, ""


def cache_key(variant: KernelVariant, arch: str) -> str:
    """The hash over everything that a compiled kernel depends on, in hexadecimal.

    Raises:
        KernelError: NVRTC, CUDA's headers or the source are missing.
    """
    try:
        files = sorted(headers_of(variant.folder / variant.source, [variant.folder, cuda_headers()]))
    except OSError as problem:
        raise KernelError(f"{variant.name}: {problem}") from problem
    content = {
        "format": FORMAT.decode(),
        "nvrtc": nvrtc_version(),
        "arch": arch,
        "entry": variant.entry,
        "defines": variant.defines,
        "options": dict(OPTIONS),
        "files": files,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# On disk


def _pack(kernel: CompiledKernel) -> bytes:
    values = attrs.asdict(kernel, filter=attrs.filters.exclude("cubin", "ptx"))
    ptx = kernel.ptx.encode()
    values |= {"cubin": len(kernel.cubin), "ptx": len(ptx)}
    body = json.dumps(values).encode() + b"\n" + kernel.cubin + ptx
    return FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes, key: str) -> CompiledKernel:
    """Raises ValueError, KeyError or TypeError for anything that `_pack` did not make under this key."""
    if not data.startswith(FORMAT):
        raise ValueError("not a kernel of this version")
    digest, _, body = data[len(FORMAT) :].partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("its checksum is wrong")
    line, _, binary = body.partition(b"\n")
    values = json.loads(line)
    if values["key"] != key:
        raise ValueError("it is another kernel's")
    cubin, ptx = binary[: values["cubin"]], binary[values["cubin"] :]
    params = tuple(Param(**param) for param in values["params"])
    return CompiledKernel(**values | {"cubin": cubin, "ptx": ptx.decode(), "params": params})


def _read(folder: Path | None, key: str) -> CompiledKernel | None:
    if folder is None:
        return None
    path = folder / f"{key}.kernel"
    try:
        return _unpack(path.read_bytes(), key)
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as problem:
        _log.warning("%s is damaged (%s): the kernel is compiled again", path, problem)
        return None


def _publish(folder: Path | None, kernel: CompiledKernel) -> None:
    """Writes an entry beside its place and renames it, so that nobody ever reads half of one."""
    if folder is None:
        _warn_unwritable("no home folder", "there is none")
        return
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".tmp", delete=False) as file:
            temporary = file.name
            file.write(_pack(kernel))
        os.replace(temporary, folder / f"{kernel.key}.kernel")
    except OSError as problem:
        _warn_unwritable(str(folder), str(problem))
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


@cache
def _warn_unwritable(folder: str, why: str) -> None:
    """Once for each folder and reason: every kernel would say the same."""
    _log.warning(
        "compiled kernels can't be kept in %s (%s): every process compiles its own; cache_dir (K3COMM_CACHE_DIR) names "
        "another folder",
        folder,
        why,
    )
