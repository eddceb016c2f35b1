"""Every kernel of the package, compiled for every architecture that it names. Needs neither a GPU nor a driver."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kernel_checks import faults

from k3comm.kernels.compile import FOLDER, KernelVariant, all_variants, compile_kernel
from k3comm.settings import Settings

_log = logging.getLogger(__name__)  # to see what each one takes: --log-cli-level=info

EVERY = [pytest.param(v, arch, id=f"{v.name}-{arch}") for v in all_variants() for arch in v.archs]


@pytest.mark.parametrize(("variant", "arch"), EVERY)
def test_variant(variant: KernelVariant, arch: str, tmp_path: Path) -> None:
    kernel = compile_kernel(variant, arch, Settings(cache_dir=tmp_path))
    figures = (kernel.registers, kernel.stack, kernel.seconds)
    _log.info("%s for %s: %s registers, %s bytes of stack, %.1f s", variant.name, arch, *figures)
    assert faults(variant, kernel) == []


def test_every_source_has_variants() -> None:
    """A kernel is a stem: the source and the module that declares its variants."""
    assert {v.source for v in all_variants() if v.folder == FOLDER} == {path.name for path in FOLDER.glob("*.cu")}
