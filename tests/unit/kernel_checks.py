"""What every compiled kernel of the package is held to; for the tests of the kernels."""

from __future__ import annotations

from k3comm.kernels.compile import CompiledKernel, KernelVariant


def faults(variant: KernelVariant, kernel: CompiledKernel) -> list[str]:
    """What is wrong with a compiled variant: spills, registers beyond its own bound, or the wrong transport."""
    found = []
    if kernel.spills is None:
        found.append("the compiler did not say whether it spills")
    elif kernel.spills:
        found.append(f"{kernel.spill_stores} bytes of spill stores and {kernel.spill_loads} of spill loads")
    bound = variant.max_registers(kernel.arch)
    if kernel.registers > bound:
        found.append(f"{kernel.registers} registers; its bound is {bound}")
    if kernel.uses_multimem != (variant.transport == "multicast"):
        used = "multimem in it" if kernel.uses_multimem else "no multimem in it"
        found.append(f"{used}, and its transport is {variant.transport}")
    return found
