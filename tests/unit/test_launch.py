"""How kernels are launched, as far as it shows without a GPU: shapes, attributes, arguments, refusals.

What needs a GPU is in tests/distributed/test_launch_gpu.py.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3comm.errors import InputError
from k3comm.kernels.compile import SHARED_LIMITS, CompiledKernel, Param
from k3comm.kernels.launch import (
    ALIGNMENT,
    MAX_GRID,
    Arguments,
    LaunchShape,
    check_shape,
    check_tensor_map,
    load_kernel,
    native_config,
    tensor_map,
)

POINTER, INT, FLOAT = Param(8, 8, "u64"), Param(4, 4, "u32"), Param(4, 4, "f32")
MAP = Param(128, 64, "b8")


def kernel(**changes: Any) -> CompiledKernel:
    values = {
        "name": "tail", "entry": "tail", "arch": "sm_90a", "cubin": b"", "ptx": "", "key": "", "params": (),
        "registers": 32, "spill_stores": 0, "spill_loads": 0, "stack": 0, "shared": 0, "max_threads": None,
        "min_blocks": None, "uses_multimem": False, "seconds": 0.0,
    }  # fmt: skip
    return CompiledKernel(**values | changes)


# Shapes


def test_sizes_by_dimension() -> None:
    shape = LaunchShape(grid=(6, 2), block=64, cluster=2, shared=100)
    assert (shape.grid, shape.block, shape.cluster) == ((6, 2, 1), (64, 1, 1), (2, 1, 1))
    assert (shape.blocks, shape.threads, shape.cluster_blocks) == (12, 64, 2)
    assert shape == LaunchShape(grid=[6, 2, 1], block=(64, 1, 1), cluster=(2, 1), shared=100)
    assert attrs.evolve(shape, pdl=True) != shape


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"grid": 0}, f"grid (0, 1, 1) given; accepted are sizes from 1 to {MAX_GRID}"),
        ({"grid": (1, 65536)}, f"grid (1, 65536, 1) given; accepted are sizes from 1 to {MAX_GRID}"),
        ({"grid": (1, 1, 1, 1)}, "(1, 1, 1, 1) given; accepted are one to three sizes"),
        ({"block": (1, 1, 65)}, "block (1, 1, 65) given; accepted are sizes from 1 to (1024, 1024, 64)"),
        ({"block": (64, 17)}, "block (64, 17, 1) given, 1088 threads; accepted are up to 1024"),
        ({"cluster": 3}, "grid (128, 1, 1) given; accepted are multiples of the cluster (3, 1, 1)"),
        ({"cluster": 16}, "cluster (16, 1, 1) given; accepted are 1 to 8 blocks"),
        ({"cluster": 0}, "cluster (0, 1, 1) given; accepted are 1 to 8 blocks"),
        ({"shared": -1}, "shared -1 given; accepted are bytes from 0"),
    ],
)
def test_a_size_out_of_range(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as error:
        LaunchShape(**{"grid": 128, "block": 256} | changes)
    assert str(error.value) == text


@pytest.mark.parametrize("arch", SHARED_LIMITS)
def test_shared_memory_that_a_block_has(arch: str) -> None:
    made = kernel(arch=arch, shared=1024)
    most = SHARED_LIMITS[arch] - 1024
    check_shape(made, LaunchShape(grid=1, block=32, shared=most))
    with pytest.raises(InputError) as error:
        check_shape(made, LaunchShape(grid=1, block=32, shared=most + 1))
    assert str(error.value) == (
        f"tail: {most + 1} bytes of dynamic shared memory given; {arch} has {most} a block beside the 1024 static ones"
    )


def test_launch_bounds() -> None:
    made = kernel(max_threads=256)
    check_shape(made, LaunchShape(grid=1, block=256))
    with pytest.raises(InputError, match=r"^tail: block \(257, 1, 1\) given, 257 threads; its .* accept up to 256$"):
        check_shape(made, LaunchShape(grid=1, block=257))


# Attributes


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
def test_attributes_are_those_that_are_asked_for(cluster: int, cooperative: bool, pdl: bool) -> None:
    shape = LaunchShape(grid=(4, 3, 2), block=(32, 4), cluster=cluster, shared=123, cooperative=cooperative, pdl=True)
    config = native_config(shape, pdl=pdl, stream=77)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 3, 2)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (32, 4, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (123, 77)
    found = {a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): a.value for a in config.attrs}
    assert config.numAttrs == len(config.attrs) == len(found)
    wanted = {"CLUSTER_DIMENSION": cluster > 1, "COOPERATIVE": cooperative, "PROGRAMMATIC_STREAM_SERIALIZATION": pdl}
    assert found.keys() == {name for name, wants in wanted.items() if wants}
    if cluster > 1:
        size = found["CLUSTER_DIMENSION"].clusterDim
        assert (size.x, size.y, size.z) == (2, 1, 1)
    if cooperative:
        assert found["COOPERATIVE"].cooperative == 1
    if pdl:
        assert found["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed == 1


# Arguments


def pointers(arguments: Arguments, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(arguments.address))


def test_what_the_device_will_read() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_int16))

    byte, short, double, pair = Param(1, 1, "u8"), Param(2, 2, "u16"), Param(8, 8, "f64"), Param(8, 4, "b8")
    params = (POINTER, INT, FLOAT, byte, short, double, pair, MAP, POINTER, INT)
    arguments = Arguments("tail", params)
    arguments.pack((1 << 40, -2, 0.5, 200, 65535, 0.1, Pair(-7, 8), bytes(range(128)), None, 2**32 - 1))
    addresses = pointers(arguments, len(params))
    assert [address % param.align for address, param in zip(addresses, params, strict=True)] == [0] * len(params)
    assert addresses[0] % ALIGNMENT == 0
    read = [ctypes.string_at(address, param.size) for address, param in zip(addresses, params, strict=True)]
    assert read == [
        struct.pack("<Q", 1 << 40),
        struct.pack("<i", -2),
        struct.pack("<f", 0.5),
        b"\xc8",
        b"\xff\xff",
        struct.pack("<d", 0.1),
        struct.pack("<ihxx", -7, 8),
        bytes(range(128)),
        bytes(8),
        b"\xff\xff\xff\xff",
    ]
    offsets = [address - addresses[0] for address in addresses]
    assert offsets == [0, 8, 12, 16, 18, 24, 32, 64, 192, 200]
    assert arguments.packed[8:12] == struct.pack("<i", -2)


def test_no_arguments() -> None:
    arguments = Arguments("tail", ())
    arguments.pack(())
    assert arguments.packed == b""
    assert arguments.address


@pytest.mark.parametrize(
    ("param", "value", "text"),
    [
        (POINTER, 0.5, "0.5 given; accepted is a pointer: an int, a tensor on a GPU or in pinned memory, or None"),
        (POINTER, 1 << 64, f"{1 << 64} given; accepted is a pointer"),
        (POINTER, torch.ones(1, dtype=torch.int64), "a tensor on cpu given; accepted is a pointer"),
        (POINTER, b"12345678", "8 bytes given; accepted is a pointer"),
        (INT, 1 << 32, f"{1 << 32} given; accepted is an int of 32 bits"),
        (INT, -(1 << 31) - 1, f"{-(1 << 31) - 1} given; accepted is an int of 32 bits"),
        (INT, 1.0, "1.0 given; accepted is an int of 32 bits"),
        (INT, None, "None given; accepted is an int of 32 bits"),
        (INT, torch.ones((), dtype=torch.int32), "a tensor on cpu given; accepted is an int of 32 bits"),
        (Param(1, 1, "u8"), 256, "256 given; accepted is an int of 8 bits"),
        (FLOAT, "1", "'1' given; accepted is a float of 32 bits"),
        (FLOAT, 1e39, "1e+39 given; accepted is a float of 32 bits"),
        (FLOAT, torch.ones(()), "a tensor on cpu given; accepted is a float of 32 bits"),
        (MAP, bytes(127), "127 bytes given; accepted is bytes or a ctypes value of 128"),
        (MAP, bytes(129), "129 bytes given; accepted is bytes or a ctypes value of 128"),
        (MAP, 5, "5 given; accepted is bytes or a ctypes value of 128"),
        (MAP, (ctypes.c_uint64 * 15)(), "120 bytes given; accepted is bytes or a ctypes value of 128"),
    ],
)
def test_an_argument_that_is_not_accepted(param: Param, value: Any, text: str) -> None:
    arguments = Arguments("tail", (INT, param))
    arguments.pack((7, {"u64": 0, "f32": 0.0, "b8": bytes(param.size)}.get(param.kind, 0)))
    before = arguments.packed
    with pytest.raises(InputError) as error:
        arguments.pack((7, value))
    assert str(error.value).startswith(f"tail: argument 1: {text}")
    assert arguments.packed == before


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3)])
def test_too_few_or_too_many(args: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as error:
        Arguments("tail", (INT, POINTER)).pack(args)
    assert str(error.value) == f"tail: {len(args)} arguments given; it takes 2"


def test_too_few_before_a_struct() -> None:
    with pytest.raises(InputError, match=r"^tail: 1 arguments given; it takes 2$"):
        Arguments("tail", (INT, MAP)).pack((1,))


KINDS = {
    "u8": st.integers(-128, 255),
    "u16": st.integers(-(1 << 15), (1 << 16) - 1),
    "u32": st.integers(-(1 << 31), (1 << 32) - 1),
    "u64": st.integers(-(1 << 63), (1 << 64) - 1),
    "f32": st.floats(width=32),
    "f64": st.floats(),
    "b8": st.binary(min_size=24, max_size=24),
}


@given(st.lists(st.sampled_from(list(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), KINDS[kind])), max_size=12))
def test_any_arguments(given_ones: list[tuple[str, Any]]) -> None:
    params = [Param(24, 8, kind) if kind == "b8" else Param(int(kind[1:]) // 8, int(kind[1:]) // 8, kind)
              for kind, _ in given_ones]  # fmt: skip
    arguments = Arguments("tail", params)
    arguments.pack([value for _, value in given_ones])
    addresses = pointers(arguments, len(params))
    for (kind, value), param, address in zip(given_ones, params, addresses, strict=True):
        read = ctypes.string_at(address, param.size)
        assert address % param.align == 0
        if kind == "b8":
            assert read == value
        elif kind[0] == "f":
            assert read == struct.pack("<f" if kind == "f32" else "<d", value)
        else:
            assert int.from_bytes(read, "little") == value % (1 << (8 * param.size))


# Devices


def test_loading_needs_a_gpu() -> None:
    with pytest.raises(InputError, match=r"^tail: cpu given; accepted is a CUDA device that torch can use$"):
        load_kernel(kernel(), torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"^tail: cuda:0 given; accepted is a CUDA device that torch can use$"):
        load_kernel(kernel(), torch.device("cuda", 0))


# Tensor maps


def matrix(rows: int = 64, columns: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.mark.parametrize(
    ("weight", "box", "swizzle", "promotion", "text"),
    [
        (matrix(dtype=torch.float32), (8, 64), 128, 128, "torch.float32 (64, 128) with strides (128, 1) given"),
        (matrix().t(), (8, 64), 128, 128, "torch.bfloat16 (128, 64) with strides (1, 128) given"),
        (matrix()[0], (8, 64), 128, 128, "torch.bfloat16 (128,) with strides (1,) given"),
        (matrix(0), (8, 64), 128, 128, "torch.bfloat16 (0, 128) with strides (128, 1) given"),
        (matrix(64, 100), (8, 64), 128, 128, "rows 200 bytes apart from address"),
        (matrix()[:, 1:], (8, 64), 128, 128, "rows 256 bytes apart from address"),
        (matrix(), (8, 64), 16, 128, "swizzle 16 and promotion 128 given; accepted are (0, 32, 64, 128) and"),
        (matrix(), (8, 64), 128, 512, "swizzle 128 and promotion 512 given"),
        (
            matrix(),
            (8, 72),
            128,
            128,
            "box (8, 72) given; accepted are 1 to 256 rows and columns, a row and at most 128",
        ),
        (matrix(), (8, 64), 64, 128, "box (8, 64) given"),
        (matrix(), (8, 4), 0, 128, "box (8, 4) given; accepted are 1 to 256 rows and columns, a row a multiple of 16"),
        (matrix(), (257, 64), 128, 128, "box (257, 64) given"),
        (matrix(), (0, 64), 128, 128, "box (0, 64) given"),
    ],
)
def test_a_tensor_map_that_is_not_accepted(
    weight: torch.Tensor, box: tuple[int, int], swizzle: int, promotion: int, text: str
) -> None:
    with pytest.raises(InputError) as error:
        check_tensor_map(weight, box, swizzle, promotion)
    assert str(error.value).startswith(f"tensor map: {text}")


@pytest.mark.parametrize(("box", "swizzle"), [((256, 64), 128), ((1, 8), 0), ((8, 256), 0), ((8, 16), 32)])
def test_a_tensor_map_that_is_accepted(box: tuple[int, int], swizzle: int) -> None:
    check_tensor_map(matrix(300, 264)[:, 8:], box, swizzle, 256)


def test_a_tensor_map_needs_a_gpu() -> None:
    with pytest.raises(InputError, match=r"^tensor map: a matrix on cpu given; accepted is one on a GPU$"):
        tensor_map(matrix(), (8, 64))
