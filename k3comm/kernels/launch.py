"""Loading kernels and launching them, on torch's current stream.

    variant = ...                                          # kernels/<name>.py
    compiled = compile_kernel(variant, arch_of(capability), settings)
    kernel = load_kernel(compiled, device)                 # once; eager, so that nothing is loaded by a first launch
    call = Launch(kernel, LaunchShape(grid=128, block=256, shared=200_000, pdl=True), settings, resident=True)
    call(tensor, pointer, 7, 0.5, tensor_map)              # every time

Everything that can be is done in `Launch.__init__`: a call packs its arguments with one `struct.pack_into` and makes
one driver call. cuda.core loads the kernel and asks for its occupancy. The launch itself goes to the driver directly
(`cuLaunchKernelEx` of cuda.bindings), because cuda.core's `launch` takes no struct by value and converts every argument
anew, and its LaunchConfig asks a device as soon as it is to be cooperative or a cluster. So here the `grid` counts
blocks, with clusters too, as in CUDA C++.

What holds for every launch:

- Programmatic dependent launch is asked for exactly if the shape says that the kernel is written for it *and*
  `settings.pdl` is on. The attribute stands on the later of two kernels: it may start before the one in front of it has
  ended, and `griddepcontrol.wait` in it waits for the end.
- A loaded kernel is never unloaded: a captured graph may still launch it.
- A count of launches is kept by `Launch`; a graph counts once, when it is captured, and not when it is replayed.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError, KernelError
from k3comm.kernels.compile import SHARED_LIMITS, CompiledKernel, Param, arch_of, refuse_capture
from k3comm.settings import Settings

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
"""Blocks a grid, and threads a block by dimension and in all (CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability")."""

MAX_CLUSTER = 8
"""Blocks a cluster that every device with clusters can do (same place); larger ones are not portable."""

ALIGNMENT = 64
"""Of the buffer that arguments are packed into: what a tensor map needs, the strictest of them."""


# Shapes


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    given = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(given) <= 3:
        raise InputError(f"{value!r} given; accepted are one to three sizes")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


@attrs.frozen(kw_only=True)
class LaunchShape:
    """How a kernel is launched.

    Attributes:
        grid: blocks, by dimension; an int is (n, 1, 1). With clusters too: a multiple of `cluster`.
        block: threads a block. cluster: blocks a cluster; (1, 1, 1) is none.
        shared: bytes of dynamic shared memory a block.
        cooperative: all blocks are to be resident at once, or the launch fails.
        pdl: the kernel is written for programmatic dependent launch: before it touches what the kernel in front of it
            writes, it waits (`griddepcontrol.wait`).

    Raises:
        InputError: a size out of range, which it names.
    """

    grid: tuple[int, int, int] = attrs.field(converter=_three)
    block: tuple[int, int, int] = attrs.field(converter=_three)
    cluster: tuple[int, int, int] = attrs.field(default=(1, 1, 1), converter=_three)
    shared: int = 0
    cooperative: bool = False
    pdl: bool = False

    def __attrs_post_init__(self) -> None:
        for name, sizes, most in (("grid", self.grid, MAX_GRID), ("block", self.block, MAX_BLOCK)):
            if not all(1 <= size <= limit for size, limit in zip(sizes, most, strict=True)):
                raise InputError(f"{name} {sizes} given; accepted are sizes from 1 to {most}")
        if self.threads > MAX_THREADS:
            raise InputError(f"block {self.block} given, {self.threads} threads; accepted are up to {MAX_THREADS}")
        if min(self.cluster) < 1 or self.cluster_blocks > MAX_CLUSTER:
            raise InputError(f"cluster {self.cluster} given; accepted are 1 to {MAX_CLUSTER} blocks")
        if any(blocks % size for blocks, size in zip(self.grid, self.cluster, strict=True)):
            raise InputError(f"grid {self.grid} given; accepted are multiples of the cluster {self.cluster}")
        if self.shared < 0:
            raise InputError(f"shared {self.shared} given; accepted are bytes from 0")

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        x, y, z = self.grid
        return x * y * z

    @property
    def threads(self) -> int:
        """Threads of a block."""
        x, y, z = self.block
        return x * y * z

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster; 1 without."""
        x, y, z = self.cluster
        return x * y * z


def check_shape(kernel: CompiledKernel, shape: LaunchShape) -> None:
    """Refuses, with InputError, a shape that the kernel can't have on its architecture. Needs no GPU."""
    if kernel.max_threads is not None and shape.threads > kernel.max_threads:
        raise InputError(
            f"{kernel.name}: block {shape.block} given, {shape.threads} threads; its launch bounds accept up to "
            f"{kernel.max_threads}"
        )
    room = SHARED_LIMITS[kernel.arch] - kernel.shared
    if shape.shared > room:
        raise InputError(
            f"{kernel.name}: {shape.shared} bytes of dynamic shared memory given; {kernel.arch} has {room} a block "
            f"beside the {kernel.shared} static ones"
        )


def native_config(shape: LaunchShape, *, pdl: bool, stream: int = 0) -> Any:
    """The driver's CUlaunchConfig of a shape, with exactly the attributes that it needs. Needs no GPU."""
    from cuda.bindings import driver

    ids = driver.CUlaunchAttributeID
    attributes = []
    if shape.cluster_blocks > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = shape.cluster
        attributes.append(attribute)
    if shape.cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.shared
    config.hStream = driver.CUstream(stream)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


# Arguments


_LETTERS = {8: "B", 16: "H", 32: "i", 64: "Q"}
_PLAIN = frozenset((int, float, bytes))


class Arguments:
    """The memory that a kernel's arguments are packed into, laid out as the entry declares them.

    Which Python value goes where:

    - 64 bits: an int, a torch tensor on a GPU or in pinned memory (its address), or None (a null pointer);
    - 8, 16, 32 bits: an int, signed or unsigned; - f32, f64: a float or an int;
    - a struct (also a scalar marked `__grid_constant__`): `bytes`, or a ctypes value, of its very size.

    The driver copies the arguments before a launch returns, so one buffer does for all calls of one thread.

    Attributes:
        address: of the `void* [n]` that the driver takes.
    """

    def __init__(self, name: str, params: Sequence[Param]) -> None:
        self._name = name
        self._params = tuple(params)
        form, offset, offsets = "<", 0, []
        for param in params:
            start = -(-offset // param.align) * param.align
            form += f"{start - offset}x" + self._letter(param)
            offsets.append(start)
            offset = start + param.size
        self._struct = struct.Struct(form)
        self._blobs = tuple((i, param.size) for i, param in enumerate(params) if param.kind[0] == "b")
        self._memory = ctypes.create_string_buffer(offset + ALIGNMENT)
        self._start = -ctypes.addressof(self._memory) % ALIGNMENT
        base = ctypes.addressof(self._memory) + self._start
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*(base + start for start in offsets))
        self.address = ctypes.addressof(self._pointers)

    @staticmethod
    def _letter(param: Param) -> str:
        if param.kind[0] == "b":
            return f"{param.size}s"
        return {"f32": "f", "f64": "d"}.get(param.kind) or _LETTERS[8 * param.size]

    def pack(self, args: Sequence[Any]) -> None:
        """Writes the arguments of the next launch.

        Raises:
            InputError: too many, too few, or one that is not accepted; names the kernel and the argument.
        """
        # Tensors with one element pass for numbers, so nothing but these three kinds may go to `struct` unseen.
        if not _PLAIN.issuperset(map(type, args)):
            args = self._converted(args)
        try:
            for index, size in self._blobs:
                if len(args[index]) != size:
                    raise struct.error
            self._struct.pack_into(self._memory, self._start, *args)
        except (struct.error, TypeError, IndexError, OverflowError):
            self._struct.pack_into(self._memory, self._start, *self._converted(args))

    @property
    def packed(self) -> bytes:
        """What the device will read."""
        return self._memory.raw[self._start : self._start + self._struct.size]

    def _converted(self, args: Sequence[Any]) -> list[Any]:
        if len(args) != len(self._params):
            raise InputError(f"{self._name}: {len(args)} arguments given; it takes {len(self._params)}")
        return [self._value(i, param, arg) for i, (param, arg) in enumerate(zip(self._params, args, strict=True))]

    def _value(self, index: int, param: Param, arg: Any) -> Any:
        kind, bits = param.kind[0], 8 * param.size
        if kind == "b":
            accepted = f"bytes or a ctypes value of {param.size}"
            if isinstance(arg, (bytes, bytearray, ctypes.Structure, ctypes.Array)) and len(bytes(arg)) == param.size:
                return bytes(arg)
        elif kind == "f":
            accepted = f"a float of {bits} bits"
            if isinstance(arg, (int, float)):
                try:
                    struct.pack("<" + self._letter(param), arg)
                except OverflowError:
                    pass
                else:
                    return arg
        else:
            accepted = f"an int of {bits} bits"
            if isinstance(arg, int) and -(1 << (bits - 1)) <= arg < 1 << bits:
                low = int(arg) & ((1 << bits) - 1)
                return low - (1 << bits) if bits == 32 and low >> 31 else low
            if bits == 64:
                accepted = "a pointer: an int, a tensor on a GPU or in pinned memory, or None"
                if arg is None:
                    return 0
                if isinstance(arg, Tensor) and (arg.is_cuda or arg.is_pinned()):
                    return arg.data_ptr()
        shown = f"a tensor on {arg.device}" if isinstance(arg, Tensor) else f"{arg!r:.80}"
        if isinstance(arg, (bytes, bytearray, ctypes.Structure, ctypes.Array)):
            shown = f"{len(bytes(arg))} bytes"
        raise InputError(f"{self._name}: argument {index}: {shown} given; accepted is {accepted}")


# Loading


class LoadedKernel:
    """A kernel on one device. Made by `load_kernel`, and there until the process ends.

    Attributes:
        compiled: what was loaded. device: where.
    """

    def __init__(self, compiled: CompiledKernel, device: torch.device) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        self.compiled = compiled
        self.device = device
        self._driver = driver
        with torch.cuda.device(device):
            Device(device.index).set_current()  # joins the primary context, which torch has made
            try:
                self._kernel = ObjectCode.from_cubin(compiled.cubin, name=compiled.name).get_kernel(compiled.entry)
            except Exception as problem:  # cuda.core's class for a driver's error is private
                raise KernelError(f"{compiled.name} can't be loaded on {device}: {problem}") from problem
            # A kernel is loaded lazily, by its first launch, unless its function is asked for.
            self._function = self._ask("cuKernelGetFunction", self._kernel.handle)
        self._shared = 0

    def allow_shared(self, size: int) -> None:
        """Lets launches have `size` bytes of dynamic shared memory; the driver is told only when it grows.

        Raises:
            KernelError: the device has less.
        """
        if size > self._shared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._ask("cuFuncSetAttribute", self._function, attribute, size)
            self._shared = size

    def prefer_shared(self) -> None:
        """Asks for all of an SM's memory as shared memory, however little a block has of it.

        Kernels that prefer different splits never run on one SM at once.
        """
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._ask("cuFuncSetAttribute", self._function, attribute, 100)

    def resident_blocks(self, shape: LaunchShape) -> int:
        """How many blocks of this shape the whole device can hold at once; the grid's size does not matter."""
        with torch.cuda.device(self.device):
            self.allow_shared(shape.shared)
            if shape.cluster_blocks > 1:
                # Not cuda.core's question: that needs its LaunchConfig, and a stream of its own.
                config = native_config(shape, pdl=False)
                clusters = self._ask("cuOccupancyMaxActiveClusters", self._function, config)
                return int(clusters) * shape.cluster_blocks
            each = self._kernel.occupancy.max_active_blocks_per_multiprocessor(shape.threads, shape.shared)
        return int(each) * torch.cuda.get_device_properties(self.device).multi_processor_count

    def _ask(self, question: str, *args: Any) -> Any:
        error, *answer = getattr(self._driver, question)(*args)
        if int(error) != 0:
            raise KernelError(f"{self.compiled.name} on {self.device}: {question}: {error_text(error)}")
        return answer[0] if answer else None


def error_text(error: Any) -> str:
    """A driver's error: its name and what the driver says of it."""
    from cuda.bindings import driver

    failed, text = driver.cuGetErrorString(error)
    return f"{error.name} ({text.decode()})" if int(failed) == 0 and text else error.name


_loaded: dict[tuple[str, str, int], LoadedKernel] = {}
_lock = threading.Lock()


def load_kernel(compiled: CompiledKernel, device: torch.device) -> LoadedKernel:
    """Puts a kernel on a device, all of it, so that no first launch has to. The same one twice is loaded once.

    Raises:
        InputError: a device without CUDA, or of another architecture than the kernel's.
        KernelError: the driver refused it.
        CaptureError: a CUDA graph is being captured.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise InputError(f"{compiled.name}: {device} given; accepted is a CUDA device that torch can use")
    refuse_capture(f"{compiled.name} would be loaded")
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    arch = arch_of(torch.cuda.get_device_capability(device))
    if arch != compiled.arch:
        raise InputError(f"{compiled.name}: compiled for {compiled.arch}; {device} needs {arch}")
    with _lock:
        place = (compiled.key, compiled.name, device.index)
        if place not in _loaded:
            _loaded[place] = LoadedKernel(compiled, device)
        return _loaded[place]


# Launching


@attrs.frozen
class LaunchRecord:
    """What a `Launch` does: kernel, shape, whether each launch asks for PDL, and how often it was called."""

    kernel: str
    shape: LaunchShape
    pdl: bool
    count: int


_launches: weakref.WeakSet[Launch] = weakref.WeakSet()


def records() -> list[LaunchRecord]:
    """A record of every `Launch` that there is."""
    return [launch.record for launch in list(_launches)]


class Launch:
    """A kernel with its shape, ready to be called; for one thread at a time.

    Args:
        kernel: it, on its device.
        shape: how it is launched.
        settings: `pdl` counts.
        resident: its blocks wait for one another, so all of the grid has to be on the device at once.

    Raises:
        InputError: the shape is not one that the kernel can have.
        KernelError: it doesn't fit the device, or as a whole not at once where it has to; names the number that does.
    """

    def __init__(self, kernel: LoadedKernel, shape: LaunchShape, settings: Settings, *, resident: bool = False) -> None:
        check_shape(kernel.compiled, shape)
        fits = kernel.resident_blocks(shape)
        least = shape.blocks if resident or shape.cooperative else shape.cluster_blocks
        if fits < least:
            raise KernelError(
                f"{kernel.compiled.name}: {shape}: {kernel.device} holds {fits} such blocks at once; it needs {least}"
            )
        self.kernel = kernel
        self.shape = shape
        self.pdl = shape.pdl and settings.pdl
        self.count = 0
        self._arguments = Arguments(kernel.compiled.name, kernel.compiled.params)
        self._config = native_config(shape, pdl=self.pdl)
        self._stream = 0
        self._stream_type = kernel._driver.CUstream
        self._launch = kernel._driver.cuLaunchKernelEx
        self._index = kernel.device.index
        _launches.add(self)

    def __call__(self, *args: Any, stream: int | None = None) -> None:
        """Launches it. The kernel's device is to be the thread's current one.

        Args:
            args: as `Arguments` says.
            stream: the handle of a stream; None is torch's current one on the kernel's device.

        Raises:
            InputError: an argument that is not accepted.
            KernelError: the driver refused the launch.
        """
        self._arguments.pack(args)
        if stream is None:
            stream = torch.cuda.current_stream(self._index).cuda_stream
        if stream != self._stream:
            self._config.hStream = self._stream_type(stream)
            self._stream = stream
        (error,) = self._launch(self._config, self.kernel._function, self._arguments.address, 0)
        if error:
            raise KernelError(f"{self.kernel.compiled.name}: {self.shape}: not launched: {error_text(error)}")
        self.count += 1

    @property
    def record(self) -> LaunchRecord:
        """What it does, and how often it was called."""
        return LaunchRecord(self.kernel.compiled.name, self.shape, self.pdl, self.count)


# Tensor maps


MAP_BYTES = 128
"""The size of a CUtensorMap: a parameter `const __grid_constant__ CUtensorMap`, or 128 bytes aligned to 64."""

SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)
MAX_BOX = 256
"""Elements of a box by dimension (CUDA driver API, cuTensorMapEncodeTiled)."""


def check_tensor_map(weight: Tensor, box: tuple[int, int], swizzle: int, promotion: int) -> None:
    """Refuses, with InputError, what `cuTensorMapEncodeTiled` would, and says why. Needs no GPU."""
    if weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.stride(1) != 1 or 0 in weight.shape:
        raise InputError(
            f"tensor map: {weight.dtype} {tuple(weight.shape)} with strides {weight.stride()} given; accepted are rows "
            "of bfloat16, each contiguous"
        )
    pitch = weight.stride(0) * weight.element_size()
    if pitch % 16 or weight.data_ptr() % 16:
        raise InputError(
            f"tensor map: rows {pitch} bytes apart from address {weight.data_ptr():#x} given; accepted are multiples "
            "of 16"
        )
    if swizzle not in SWIZZLES or promotion not in PROMOTIONS:
        raise InputError(
            f"tensor map: swizzle {swizzle} and promotion {promotion} given; accepted are {SWIZZLES} and {PROMOTIONS}"
        )
    inner = box[1] * weight.element_size()
    if not all(1 <= size <= MAX_BOX for size in box) or inner % 16 or (swizzle and inner > swizzle):
        widest = f"and at most {swizzle} " if swizzle else ""
        raise InputError(
            f"tensor map: box {box} given; accepted are 1 to {MAX_BOX} rows and columns, a row {widest}a multiple of "
            "16 bytes"
        )


def tensor_map(weight: Tensor, box: tuple[int, int], *, swizzle: int = 128, promotion: int = 128) -> bytes:
    """A CUtensorMap, for TMA loads of boxes of a matrix: 128 bytes to pass to a kernel by value.

    It holds the address: a weight that moves needs another one. The last dimension is the fastest in `box` as in torch;
    in the kernel's coordinates it comes first. What lies outside the matrix reads as zero.

    Args:
        weight: [N, L], BF16, rows contiguous and a multiple of 16 bytes apart.
        box: rows and columns of a box, up to 256 each.
        swizzle: bytes of the pattern in shared memory: 0, 32, 64 or 128. A row of the box is no longer than that.
        promotion: bytes that the L2 cache fetches at least: 0, 64, 128 or 256.

    Raises:
        InputError: not accepted, or not on a GPU. KernelError: the driver refused it.
    """
    check_tensor_map(weight, box, swizzle, promotion)
    if not weight.is_cuda:
        raise InputError(f"tensor map: a matrix on {weight.device} given; accepted is one on a GPU")
    # Not cuda.core's TensorMapDescriptor: its bytes can't be had, and here they go into a packed struct.
    from cuda.bindings import driver

    error, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        weight.data_ptr(),
        [driver.cuuint64_t(size) for size in reversed(weight.shape)],
        [driver.cuuint64_t(weight.stride(0) * weight.element_size())],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(SWIZZLES.index(swizzle)),
        driver.CUtensorMapL2promotion(PROMOTIONS.index(promotion)),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise KernelError(f"tensor map of {tuple(weight.shape)} with box {box}: {error_text(error)}")
    return struct.pack("<16Q", *(int(word) for word in made.opaque))
