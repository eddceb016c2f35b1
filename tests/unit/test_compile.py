"""Kernels from source to machine code, and the cache between. Needs neither a GPU nor a driver."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kernel_checks import faults

from k3comm.errors import CaptureError, InputError, KernelError
from k3comm.kernels import compile as module
from k3comm.kernels.compile import (
    ARCHITECTURES,
    CompiledKernel,
    Counts,
    KernelVariant,
    Param,
    all_variants,
    arch_of,
    cache_key,
    compile_kernel,
    counts,
    to_ptx,
)
from k3comm.settings import Settings

ARCHS = list(ARCHITECTURES.values())

SOURCE = """
#include <cuda_bf16.h>
#include "half.cuh"

struct alignas(64) Map { char bytes[128]; };
struct Pair { int a; short b; };

extern "C" __global__ void __launch_bounds__(96, 2)
scale(const __nv_bfloat16* __restrict__ in, float* out, int n, float factor, double unused, unsigned char c, short s,
      long long far, Pair pair, const __grid_constant__ Map map)
{
    __shared__ float staged[100];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    staged[threadIdx.x] = __bfloat162float(in[i]);
    __syncthreads();
    float value = staged[(threadIdx.x + 1) % 96];
#ifdef MULTICAST
    asm volatile("{ /* put */ multimem.st.relaxed.sys.global.f32 [%0], %1; }" :: "l"(out), "f"(value));
#else
    // not multimem.st
    asm volatile("/* multimem.st */");
#endif
    value = half_of(value) * factor * FACTOR + map.bytes[threadIdx.x];
    if (i < n) out[i] = value + c + s + far + pair.a + pair.b + unused;
}

extern "C" __global__ void second(float* out) { out[0] = 1.0f; }
"""

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* out, const float* in)
{
    float values[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = in[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[(i * 7 + 3) % 64];
}
"""


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memory", {})
    module._warn_unwritable.cache_clear()
    counts.compiled = counts.in_memory = counts.on_disk = 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "kernels"
    place.mkdir()
    (place / "scale.cu").write_text(SOURCE)
    (place / "half.cuh").write_text("__device__ float half_of(float x) { return 0.5f * x; }\n")
    return place


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def scale(folder: Path, **changes: Any) -> KernelVariant:
    given = {"name": "scale", "source": "scale.cu", "entry": "scale", "defines": {"FACTOR": 2}, "folder": folder}
    return KernelVariant(**given | changes)


def forget() -> None:
    module._memory.clear()


def entries(settings: Settings) -> list[Path]:
    assert settings.cache_dir is not None
    return sorted(Path(settings.cache_dir).iterdir())


# Architectures


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")]
)
def test_the_architecture_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch


def test_a_device_without_kernels() -> None:
    with pytest.raises(InputError, match=r"^compute capability 8\.0: kernels are made for 9\.0, 10\.0, 10\.3, 12\.0$"):
        arch_of((8, 0))


def test_every_architecture_has_a_shared_memory_limit() -> None:
    assert set(module.SHARED_LIMITS) == set(ARCHS)


# What comes out


@pytest.mark.parametrize("multicast", [False, True], ids=["peer", "multicast"])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiled(folder: Path, settings: Settings, arch: str, multicast: bool) -> None:
    macros: dict[str, int | str] = {"FACTOR": 2} | ({"MULTICAST": 1} if multicast else {})
    variant = scale(folder, defines=macros, registers=40, transport="multicast" if multicast else "peer")
    kernel = compile_kernel(variant, arch, settings)
    assert (kernel.name, kernel.entry, kernel.arch) == ("scale", "scale", arch)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in kernel.ptx
    assert kernel.params == (
        Param(8, 8, "u64"),
        Param(8, 8, "u64"),
        Param(4, 4, "u32"),
        Param(4, 4, "f32"),
        Param(8, 8, "f64"),
        Param(1, 1, "u8"),
        Param(2, 2, "u16"),
        Param(8, 8, "u64"),
        Param(8, 4, "b8"),
        Param(128, 64, "b8"),
    )
    assert 8 <= kernel.registers <= 40
    # sm_100 and later keep some of a block's shared memory for themselves; it is counted here.
    assert kernel.shared >= 400
    assert (kernel.max_threads, kernel.min_blocks, kernel.stack, kernel.spills) == (96, 2, 0, 0)
    assert kernel.uses_multimem == multicast
    assert ("multimem.st" in to_ptx(variant, arch, settings)) is True  # in a comment, without multicast
    assert faults(variant, kernel) == []


def test_an_entry_without_arguments_or_bounds(folder: Path, settings: Settings) -> None:
    (folder / "empty.cu").write_text('extern "C" __global__ void empty() {}')
    kernel = compile_kernel(scale(folder, source="empty.cu", entry="empty"), "sm_90a", settings)
    assert (kernel.params, kernel.max_threads, kernel.min_blocks, kernel.shared) == ((), None, None, 0)


def test_of_several_entries_the_right_one(folder: Path, settings: Settings) -> None:
    both = [compile_kernel(scale(folder, entry=entry), "sm_90a", settings) for entry in ("scale", "second")]
    assert [len(kernel.params) for kernel in both] == [10, 1]
    assert both[0].registers > both[1].registers
    assert both[1].shared == 0


@pytest.mark.parametrize("entry", ["scale", "second", "spill"])
def test_without_the_assemblers_report_the_cubin_tells(folder: Path, settings: Settings, entry: str) -> None:
    source = "spill.cu" if entry == "spill" else "scale.cu"
    (folder / "spill.cu").write_text(SPILLING)
    kernel = compile_kernel(scale(folder, source=source, entry=entry), "sm_90a", settings)
    told = module._from_cubin(kernel.cubin, "a variant", entry)
    assert (told["registers"], told["stack"]) == (kernel.registers, kernel.stack)
    assert told["shared"] in (kernel.shared, kernel.shared + 1024)  # with what the driver keeps of it on sm_90
    assert (told["spill_stores"], told["spill_loads"]) == (None, None)
    silent = attrs.evolve(kernel, spill_stores=None, spill_loads=None)
    assert "the compiler did not say whether it spills" in faults(scale(folder), silent)
    with pytest.raises(KernelError, match="neither the assembler's report nor the cubin tell the registers of other"):
        module._from_cubin(kernel.cubin, "a variant", "other")


def test_faults_are_found(folder: Path, settings: Settings) -> None:
    (folder / "spill.cu").write_text(SPILLING)
    kernel = compile_kernel(scale(folder, source="spill.cu", entry="spill"), "sm_90a", settings)
    assert kernel.registers <= 32  # what launch bounds of 2 x 1024 threads leave
    assert kernel.spill_stores > 0
    assert kernel.spill_loads > 0
    wanted = scale(folder, source="spill.cu", entry="spill", registers={"sm_90a": 10}, transport="multicast")
    assert faults(wanted, kernel) == [
        f"{kernel.spill_stores} bytes of spill stores and {kernel.spill_loads} of spill loads",
        f"{kernel.registers} registers; its bound is 10",
        "no multimem in it, and its transport is multicast",
    ]
    loud = compile_kernel(scale(folder, defines={"FACTOR": 2, "MULTICAST": 1}), "sm_90a", settings)
    assert faults(scale(folder), loud) == ["multimem in it, and its transport is None"]


# Refusals


def test_a_compile_error_names_file_and_line(folder: Path, settings: Settings) -> None:
    (folder / "scale.cu").write_text('extern "C" __global__ void scale(int* out)\n{\n    out[0] = nowhere;\n}\n')
    with pytest.raises(KernelError, match=r"(?s)^scale does not compile for sm_90a: .*scale\.cu\(3\): error:.*nowhere"):
        compile_kernel(scale(folder), "sm_90a", settings)
    assert not Path(str(settings.cache_dir)).exists()


def test_an_error_in_a_header_names_it(folder: Path, settings: Settings) -> None:
    (folder / "half.cuh").write_text("\n#error here\n")
    with pytest.raises(KernelError, match=r"half\.cuh\(2\)"):
        compile_kernel(scale(folder), "sm_100a", settings)


def test_a_macro_that_is_missing(folder: Path, settings: Settings) -> None:
    with pytest.raises(KernelError, match=r"FACTOR"):
        compile_kernel(scale(folder, defines={}), "sm_90a", settings)


def test_an_entry_that_is_not_there(folder: Path, settings: Settings) -> None:
    with pytest.raises(KernelError, match=r'^scale: scales is not an extern "C" __global__ function of the source$'):
        compile_kernel(scale(folder, entry="scales"), "sm_90a", settings)


def test_a_source_that_is_not_there(folder: Path, settings: Settings) -> None:
    with pytest.raises(KernelError, match=r"^scale: .*gone\.cu"):
        compile_kernel(scale(folder, source="gone.cu"), "sm_90a", settings)


@pytest.mark.parametrize("arch", ["sm_90", "sm_80a", "", "SM_90A"])
def test_an_unknown_architecture(folder: Path, settings: Settings, arch: str) -> None:
    text = f"architecture '{arch}' given; accepted are sm_90a, sm_100a, sm_103a, sm_120a"
    with pytest.raises(InputError) as error:
        compile_kernel(scale(folder), arch, settings)
    assert str(error.value) == text
    with pytest.raises(InputError) as error:
        scale(folder, archs=(arch,))
    assert str(error.value) == text


def test_an_architecture_that_it_is_not_made_for(folder: Path, settings: Settings) -> None:
    with pytest.raises(InputError, match=r"^scale: sm_100a given; it is made for sm_90a$"):
        compile_kernel(scale(folder, archs=["sm_90a"]), "sm_100a", settings)


def test_never_under_capture(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not from the cache: what is prepared late once would be compiled late elsewhere."""
    compile_kernel(scale(folder), "sm_90a", settings)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"^scale would be compiled while a CUDA graph is captured"):
        compile_kernel(scale(folder), "sm_90a", settings)


def test_without_a_compiler(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    module.nvrtc_version.cache_clear()
    with pytest.raises(KernelError, match=r"no libnvrtc\.so\.13.*install nvidia-cuda-nvrtc"):
        compile_kernel(scale(folder), "sm_90a", settings)


def test_without_headers(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    module.cuda_headers.cache_clear()
    with pytest.raises(KernelError, match="install nvidia-cuda-runtime"):
        compile_kernel(scale(folder), "sm_90a", settings)


@pytest.fixture(autouse=True)
def found_again() -> Iterator[None]:
    """What the two tests above make unfindable."""
    remembered = (module.nvrtc_version, module.cuda_headers)
    yield
    for answer in remembered:
        answer.cache_clear()


def test_no_device_is_asked(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    def asked(*args: object) -> None:
        raise AssertionError("a device was asked")

    monkeypatch.setattr(cuda.core.Device, "__new__", asked)
    assert "scale" in repr(compile_kernel(scale(folder), "sm_120a", settings))


# The cache


def test_the_second_time_nothing_is_compiled(folder: Path, settings: Settings) -> None:
    first = compile_kernel(scale(folder), "sm_90a", settings)
    assert counts == Counts(compiled=1)
    assert compile_kernel(scale(folder), "sm_90a", settings) == first
    assert counts == Counts(compiled=1, in_memory=1)
    forget()
    assert compile_kernel(scale(folder), "sm_90a", settings) == first
    assert counts == Counts(compiled=1, in_memory=1, on_disk=1)
    assert [path.name for path in entries(settings)] == [f"{first.key}.kernel"]


def test_a_name_is_not_part_of_the_key(folder: Path, settings: Settings) -> None:
    one, other = (compile_kernel(scale(folder, name=name), "sm_90a", settings) for name in ("one", "other"))
    assert counts.compiled == 1
    assert (one.name, other.name) == ("one", "other")
    assert one.cubin == other.cubin


@pytest.mark.parametrize("what", ["source", "header", "header's header", "macro", "entry", "arch", "options", "nvrtc"])
def test_a_change_makes_another_key(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "half.cuh").write_text('#include "deep.cuh"\n__device__ float half_of(float x) { return x * HALF; }\n')
    (folder / "deep.cuh").write_text("#define HALF 0.5f\n")
    variant, arch = scale(folder), "sm_90a"
    before = cache_key(variant, arch)
    assert cache_key(variant, arch) == before
    if what == "source":
        (folder / "scale.cu").write_text(SOURCE + "\n")
    elif what == "header":
        with (folder / "half.cuh").open("a") as file:
            file.write("\n")
    elif what == "header's header":
        (folder / "deep.cuh").write_text("#define HALF 0.6f\n")
    elif what == "macro":
        variant = scale(folder, defines={"FACTOR": 3})
    elif what == "entry":
        variant = scale(folder, entry="second")
    elif what == "arch":
        arch = "sm_100a"
    elif what == "options":
        monkeypatch.setattr(module, "OPTIONS", {**module.OPTIONS, "fma": False})
    else:
        monkeypatch.setattr(module, "nvrtc_version", lambda: (13, 99))
    assert cache_key(variant, arch) != before


def test_a_header_that_appears_makes_another_key(folder: Path) -> None:
    """One in quotes is looked for beside the file first."""
    before = cache_key(scale(folder), "sm_90a")
    (folder / "cuda_bf16.h").write_text("")
    assert cache_key(scale(folder), "sm_90a") != before


def test_cudas_own_headers_count(folder: Path) -> None:
    names = {name for name, _ in module.headers_of(folder / "scale.cu", [folder, module.cuda_headers()])}
    assert {"scale.cu", "half.cuh", "cuda_bf16.h", "cuda_bf16.hpp"} <= names


def test_a_key_does_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    folder_key = cache_key(scale(folder), "sm_90a")
    folder.rename(other)
    assert cache_key(scale(other), "sm_90a") == folder_key


def test_headers_that_include_each_other(folder: Path) -> None:
    (folder / "half.cuh").write_text('#include "scale.cu"\n  #  include "half.cuh"\n')
    assert len([name for name, _ in module.headers_of(folder / "scale.cu", [folder])]) == 3  # cuda_bf16.h is nowhere


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "cut short": lambda data: data[:40],
    "longer": lambda data: data + b"x",
    "a bit": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "header": lambda data: data.replace(b"sm_90a", b"sm_91a", 1),
    "other format": lambda data: data.replace(b"kernel 1", b"kernel 2", 1),
    "text": lambda data: b"hello\n" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_compiled_again(
    folder: Path, settings: Settings, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = compile_kernel(scale(folder), "sm_90a", settings)
    (path,) = entries(settings)
    data = path.read_bytes()
    path.write_bytes(DAMAGE[damage](data))
    forget()
    with caplog.at_level(logging.WARNING):
        assert compile_kernel(scale(folder), "sm_90a", settings) == good
    assert counts == Counts(compiled=2)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert module._unpack(path.read_bytes(), good.key) == good  # mended
    assert entries(settings) == [path]


def test_an_entry_under_another_key_is_not_believed(folder: Path, settings: Settings) -> None:
    compile_kernel(scale(folder), "sm_90a", settings)
    (path,) = entries(settings)
    other = scale(folder, defines={"FACTOR": 3})
    path.rename(path.with_name(f"{cache_key(other, 'sm_90a')}.kernel"))
    forget()
    compile_kernel(other, "sm_90a", settings)
    assert counts == Counts(compiled=2)


@pytest.mark.parametrize("obstacle", ["a file in its place", "under a file", "no home"])
def test_a_folder_that_cannot_be_written(
    folder: Path, tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the way and not permissions: root may write everywhere."""
    (tmp_path / "file").write_text("")
    settings = Settings(cache_dir=tmp_path / "file" / ("x" if obstacle == "under a file" else ""))
    if obstacle == "no home":
        settings = Settings()
        monkeypatch.setattr(module, "user_cache_folder", lambda: None)
    with caplog.at_level(logging.WARNING):
        compile_kernel(scale(folder), "sm_90a", settings)
        compile_kernel(scale(folder, entry="second"), "sm_90a", settings)
    assert counts == Counts(compiled=2)
    assert len(caplog.records) == 1
    assert "K3COMM_CACHE_DIR" in caplog.text


def test_the_default_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    compile_kernel(scale(folder), "sm_90a")
    assert len(list((tmp_path / "xdg" / "k3comm").iterdir())) == 1
    assert (tmp_path / "xdg" / "k3comm").stat().st_mode & 0o077 == 0


WRITER = """
import sys
from pathlib import Path
from k3comm.kernels import compile as module
from k3comm.settings import Settings

folder, cache = map(Path, sys.argv[1:])
variant = module.KernelVariant(name="scale", source="scale.cu", entry="scale", defines={"FACTOR": 2}, folder=folder)
kernel = module.compile_kernel(variant, "sm_90a", Settings(cache_dir=cache))
for _ in range(50):
    module._publish(cache, kernel)
    assert module._read(cache, kernel.key) == kernel
"""


def test_many_processes_publish_at_once(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "shared"
    command = [sys.executable, "-c", WRITER, str(folder), str(cache)]
    root = Path(module.__file__).parents[2]
    writers = [
        subprocess.Popen(
            command, cwd=root, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
        )
        for _ in range(3)
    ]
    said = [writer.communicate(timeout=90)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], said
    assert "damaged" not in "".join(said)
    assert [path.suffix for path in cache.iterdir()] == [".kernel"]  # and no temporary file


def test_a_kernel_is_a_value(folder: Path, settings: Settings) -> None:
    kernel = compile_kernel(scale(folder), "sm_90a", settings)
    assert isinstance(kernel, CompiledKernel)
    assert len(repr(kernel)) < 1000  # neither cubin nor PTX
    assert attrs.evolve(kernel, seconds=9.0) == kernel
    assert len({scale(folder), scale(folder, defines=[("FACTOR", "2")])}) == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        kernel.name = "x"  # type: ignore[misc]


def test_flags_become_numbers(folder: Path) -> None:
    assert scale(folder, defines={"B": True, "A": False}).defines == (("A", "0"), ("B", "1"))


# The registry


@pytest.mark.parametrize("twice", [False, True])
def test_the_modules_beside_the_sources_are_asked(folder: Path, twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "other.cu").write_text("")
    monkeypatch.setattr(module, "FOLDER", folder)
    for name in ("scale", "other"):
        stand_in = types.ModuleType(f"k3comm.kernels.{name}")
        made = (scale(folder, name="scale" if twice else name),)
        stand_in.variants = lambda made=made: made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    if twice:
        with pytest.raises(KernelError, match=r"^scale\.cu: two variants are called scale$"):
            all_variants()
    else:
        assert [variant.name for variant in all_variants()] == ["other", "scale"]
