"""What all tests share: nothing that imports torch, so that the pure parts are tested without it."""

import gc
import os

import hypothesis

# Start from hypothesis' own choice (its "ci" profile where CI is set: the same examples in each run). No time limit per
# example: on a small, busy machine a first call that compiles or imports would fail by chance.
hypothesis.settings.register_profile("k3comm", parent=hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("k3comm")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: half as many again as there are cores, as a good part of the tests wait for deadlines to pass."""
    cores = len(os.sched_getaffinity(0))
    return cores + (cores + 1) // 2


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end, so no later search for garbage goes through them."""
    gc.freeze()
