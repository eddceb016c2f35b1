"""What only a GPU shows of compiling and launching kernels. Each rank for itself; one is enough:

torchrun --standalone --nproc-per-node 1 -m pytest tests/distributed/test_launch_gpu.py -v -p no:cacheprovider
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3comm.errors import CaptureError, InputError, KernelError
from k3comm.kernels.compile import ARCHITECTURES, KernelVariant, arch_of, compile_kernel
from k3comm.kernels.launch import Launch, LaunchShape, LoadedKernel, load_kernel, records, tensor_map
from k3comm.settings import Settings

SOURCE = """
struct alignas(64) Map { char bytes[128]; };
struct Pair { int a; float b; };

extern "C" __global__ void add(const float* in, float* out, int n, float factor, Pair pair, long long far)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * factor + pair.a + pair.b + far;
    asm volatile("griddepcontrol.launch_dependents;");
}

// The last word of the dynamic shared memory, block by block, and how many blocks a cluster has.
extern "C" __global__ void far_shared(int* out, int words)
{
    extern __shared__ int memory[];
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    memory[words - 1 - threadIdx.x] = blockIdx.x + threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = memory[words - 1] * 100 + blocks;
}

// Every block waits for all others: ends only if they are on the device together.
extern "C" __global__ void meet(unsigned* counter, unsigned* out)
{
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1u);
        while (*(volatile unsigned*)counter < gridDim.x) {}
        out[blockIdx.x] = *(volatile unsigned*)counter;
    }
}

// One box of a matrix, by TMA, as it comes to lie in shared memory.
extern "C" __global__ void box(const __grid_constant__ Map map, unsigned short* out, int column, int row)
{
    __shared__ alignas(1024) unsigned short tile[ROWS * COLUMNS];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar));
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(2 * ROWS * COLUMNS));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra wait; }"
                 :: "r"(bar) : "memory");
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) out[i] = tile[i];
}
"""

_log = logging.getLogger(__name__)

ROWS, COLUMNS = 16, 64
PAIR = b"\x03\x00\x00\x00\x00\x00\x00\x3f"
"""{3, 0.5f}"""


@pytest.fixture(autouse=True)
def a_gpu(skip_all_unless: Callable[[bool, str], None]) -> None:
    served = torch.cuda.is_available() and torch.cuda.get_device_capability() in ARCHITECTURES
    skip_all_unless(served, "needs a GPU that kernels are made for")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def load(tmp_path: Path, device: torch.device) -> Callable[..., LoadedKernel]:
    (tmp_path / "lab.cu").write_text(SOURCE)

    def make(entry: str, arch: str | None = None) -> LoadedKernel:
        macros = {"ROWS": ROWS, "COLUMNS": COLUMNS}
        variant = KernelVariant(name=entry, source="lab.cu", entry=entry, defines=macros, folder=tmp_path)
        arch = arch or arch_of(torch.cuda.get_device_capability())
        return load_kernel(compile_kernel(variant, arch, Settings(cache_dir=tmp_path / "cache")), device)

    return make


Load = Callable[..., LoadedKernel]


def test_arguments_arrive(load: Load, device: torch.device) -> None:
    x = torch.randn(1000, device=device)
    out = torch.zeros_like(x)
    call = Launch(load("add"), LaunchShape(grid=4, block=256), Settings())
    call(x, out.data_ptr(), 900, 2.0, PAIR, -4)
    expected = torch.cat((x[:900] * 2.0 + 3 + 0.5 - 4, torch.zeros(100, device=device)))
    torch.testing.assert_close(out, expected)
    with pytest.raises(InputError, match=r"^add: argument 0: a tensor on cpu given"):
        call(x.cpu(), out, 900, 2.0, PAIR, -4)
    assert (call.count, call.record.pdl) == (1, False)


def test_pinned_memory_is_a_pointer_too(load: Load) -> None:
    x, out = torch.arange(8.0).pin_memory(), torch.zeros(8).pin_memory()
    Launch(load("add"), LaunchShape(grid=1, block=32), Settings())(x, out, 8, 1.0, bytes(8), 0)
    torch.cuda.synchronize()
    assert torch.equal(x, out)


def test_the_driver_agrees_about_the_kernel(load: Load) -> None:
    """What is parsed without a driver is what the driver finds in the cubin."""
    for entry in ("add", "far_shared", "meet", "box"):
        kernel = load(entry)
        attributes = kernel._kernel.attributes
        assert kernel.compiled.registers == attributes.num_regs
        # Where the assembler made no report, with what the driver keeps for itself.
        assert kernel.compiled.shared - attributes.shared_size_bytes in (0, 1024)
        assert attributes.local_size_bytes >= kernel.compiled.stack
        sizes = [int(info.size) for info in kernel._kernel.arguments_info]
        assert sizes == [param.size for param in kernel.compiled.params]


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_every_launch_obeys_pdl(load: Load, device: torch.device, asked: bool, allowed: bool) -> None:
    """Chained launches with the attribute, eager and in a graph: each waits for the one before."""
    call = Launch(load("add"), LaunchShape(grid=8, block=128, pdl=asked), Settings(pdl=allowed))
    x, out = torch.zeros(1024, device=device), torch.zeros(1024, device=device)

    def chain() -> None:
        for _ in range(10):
            call(x, out, 1024, 1.0, bytes(8), 1)
            call(out, x, 1024, 1.0, bytes(8), 1)

    chain()
    assert torch.equal(x, torch.full_like(x, 20.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(5):
        graph.replay()
    assert torch.equal(x, torch.full_like(x, 120.0))
    assert call.pdl == (asked and allowed)
    assert call.record in records()
    assert (call.record.pdl, call.record.count) == (asked and allowed, 40)


def test_torchs_current_stream(load: Load, device: torch.device) -> None:
    """Behind a long wait on that stream, not beside it."""
    call = Launch(load("add"), LaunchShape(grid=1, block=32), Settings())
    x, out = torch.zeros(32, device=device), torch.zeros(32, device=device)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.fill_(5.0)
        call(x, out, 32, 1.0, bytes(8), 0)
    call(x, out, 32, 1.0, bytes(8), 0, stream=side.cuda_stream)
    side.synchronize()
    assert torch.equal(out, torch.full_like(out, 5.0))


@pytest.mark.parametrize("cluster", [1, 2])
def test_all_of_the_shared_memory_and_clusters(load: Load, device: torch.device, cluster: int) -> None:
    from k3comm.kernels.compile import SHARED_LIMITS

    kernel = load("far_shared")
    most = SHARED_LIMITS[kernel.compiled.arch] - kernel.compiled.shared
    out = torch.zeros(8, dtype=torch.int32, device=device)
    shape = LaunchShape(grid=8, block=32, cluster=cluster, shared=most)
    Launch(kernel, shape, Settings())(out, most // 4)
    assert out.tolist() == [100 * block + cluster for block in range(8)]
    _log.info("%s blocks of %s bytes fit, in clusters of %s", kernel.resident_blocks(shape), most, cluster)


@pytest.mark.parametrize("cooperative", [False, True])
def test_blocks_that_wait_for_one_another(load: Load, device: torch.device, cooperative: bool) -> None:
    kernel = load("meet")
    shared = 100 * 1024 if torch.cuda.get_device_capability() < (12, 0) else 60 * 1024
    most = kernel.resident_blocks(LaunchShape(grid=1, block=128, shared=shared))
    assert most >= torch.cuda.get_device_properties(device).multi_processor_count
    shape = LaunchShape(grid=most, block=128, shared=shared, cooperative=cooperative)
    counter, out = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, most))
    Launch(kernel, shape, Settings(), resident=True)(counter, out)
    assert out.tolist() == [most] * most
    with pytest.raises(KernelError, match=rf"holds {most} such blocks at once; it needs {most + 1}$"):
        Launch(kernel, LaunchShape(grid=most + 1, block=128, shared=shared), Settings(), resident=True)


@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_tensor_map(load: Load, device: torch.device, swizzle: int) -> None:
    """Boxes inside and at the edge; with the 128-byte swizzle, 16-byte piece p of row r lies at p xor r mod 8."""
    weight = torch.randn(40, 3 * COLUMNS, device=device).bfloat16()[:, COLUMNS:]
    made = tensor_map(weight, (ROWS, COLUMNS), swizzle=swizzle)
    call = Launch(load("box"), LaunchShape(grid=1, block=128), Settings())
    for column, row in ((0, 0), (COLUMNS, 3), (COLUMNS // 2, 30), (COLUMNS + 8, 0)):
        out = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
        call(made, out, column, row)
        padded = torch.zeros(64, 4 * COLUMNS, dtype=torch.bfloat16, device=device)
        padded[:40, : 2 * COLUMNS] = weight
        expected = padded[row : row + ROWS, column : column + COLUMNS].reshape(ROWS, 8, 8)
        if swizzle:
            pieces = torch.arange(8, device=device) ^ (torch.arange(ROWS, device=device)[:, None] % 8)
            expected = torch.stack([line[order] for line, order in zip(expected, pieces, strict=True)])
        assert torch.equal(out, expected.reshape(ROWS, COLUMNS))


def test_nothing_is_prepared_under_capture(load: Load, device: torch.device) -> None:
    kernel = load("add")
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device=device)
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(CaptureError, match="add would be compiled"):
            load("add")
        with pytest.raises(CaptureError, match="add would be loaded"):
            load_kernel(kernel.compiled, device)


def test_a_kernel_for_another_device(load: Load) -> None:
    mine = arch_of(torch.cuda.get_device_capability())
    other = next(arch for arch in ARCHITECTURES.values() if arch != mine)
    with pytest.raises(InputError, match=rf"^add: compiled for {other}; cuda:\d needs {mine}$"):
        load("add", other)


def test_the_same_kernel_is_loaded_once(load: Load) -> None:
    assert load("add") is load("add")


def test_a_launch_that_the_driver_refuses(load: Load, device: torch.device) -> None:
    call = Launch(load("add"), LaunchShape(grid=1, block=32), Settings())
    call._config.blockDimX = 4096
    x = torch.zeros(32, device=device)
    with pytest.raises(KernelError, match=r"^add: LaunchShape.*: not launched: CUDA_ERROR_INVALID_VALUE"):
        call(x, x, 32, 1.0, bytes(8), 0)
    assert call.count == 0


def test_what_a_call_costs_the_host(load: Load, device: torch.device) -> None:
    """Only shown: run with --log-cli-level=info."""
    call = Launch(load("add"), LaunchShape(grid=1, block=32), Settings())
    x = torch.zeros(32, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    ways: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
        "tensors": ((x, x, 32, 1.0, PAIR, 0), {}),
        "addresses": ((x.data_ptr(), x.data_ptr(), 32, 1.0, PAIR, 0), {}),
        "addresses and stream": ((x.data_ptr(), x.data_ptr(), 32, 1.0, PAIR, 0), {"stream": stream}),
    }
    for name, (args, more) in ways.items():
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call(*args, **more)
            best = min(best, (time.perf_counter() - start) / 200)
        _log.info("a call with %s: %.2f us of host time", name, best * 1e6)
    assert call.count == 12000
