"""`k3comm bench` and `k3comm tune` as torchrun starts them: every rank runs the command, one speaks and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3comm import cli
from k3comm.cli import _timing
from k3comm.cli._results import load_results
from k3comm.tiers import Tier, load_windows

SMALL = ["--device", "cpu", "--hidden", "48", "--latent", "16", "--layers", "2", "--replays", "1", "--repeats", "3"]


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timing, "HOST_CACHE_BYTES", 1 << 12)


def test_measure_then_tune(
    rank: int, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *SMALL, "--rows", "1,9", "--json", "bench.json"]) == 0
    shown = capsys.readouterr().out
    assert (Path("bench.json").exists(), "SHORT RUN" in shown, shown != "") == (rank == 0,) * 3
    if rank == 0:
        results = load_results("bench.json")
        assert (results.world_size, results.rows, results.failures) == (world_size, (1, 9), ())
        assert all(one.engaged == one.calls for one in results.measurements)
        assert cli.main(["tune", "bench.json"]) == 0
        windows = load_windows(f"host_{world_size}.toml")
        assert set(windows.timings) == {Tier[arm] for arm in results.arms if arm in Tier.__members__}
        assert windows.measured["short_run"] == "yes"


def test_tune_measures_by_itself(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiers = "PEER_AR,SEPARATE_REDUCE"
    assert cli.main(["tune", *SMALL, "--rows", "4", "--no-rivals", "--tiers", tiers, "--out", "mine.toml"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "", "no rank made another table"
    assert (Path("mine.toml").exists(), shown.out != "") == (rank == 0, rank == 0)
    if rank == 0:
        assert [tier.name for tier in load_windows("mine.toml").timings] == tiers.split(",")


def test_a_tier_that_is_not_agreed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *SMALL, "--rows", "4", "--tiers", "MNNVL_CUTEDSL"]) == 2
    assert "--tiers: MNNVL_CUTEDSL is not agreed" in capsys.readouterr().err


def test_the_file_is_json_for_machines(rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    arguments = [*SMALL, "--rows", "2", "--no-rivals", "--tiers", "SEPARATE_REDUCE", "--json", str(path)]
    assert cli.main(["bench", *arguments]) == 0
    capsys.readouterr()
    if rank == 0:
        assert json.loads(path.read_text())["short"] is True
