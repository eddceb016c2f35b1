"""benchmarks/prefill.py as torchrun starts it, with small widths: every rank runs it, one speaks and writes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3comm.cli import _timing
from k3comm.cli._results import load_results
from k3comm.tiers import Tier

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prefill.py"
SMALL = ["--device", "cpu", "--hidden", "48", "--latent", "16", "--layers", "2", "--repeats", "2", "--seconds", "1e-6"]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The script's."""
    monkeypatch.setattr(_timing, "HOST_CACHE_BYTES", 1 << 12)
    spec = importlib.util.spec_from_file_location("prefill", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ROWS == (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    made: Callable[[list[str]], int] = module.main
    return made


def test_a_run(
    rank: int,
    world_size: int,
    main: Callable[[list[str]], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")  # of the development dependencies, on every rank
    monkeypatch.chdir(tmp_path)
    outputs = ["--json", "prefill.json", "--plot", "prefill.png"]
    assert main([*SMALL, "--rows", "32,512", *outputs]) == 0
    shown = capsys.readouterr().out
    assert (Path("prefill.json").exists(), Path("prefill.png").exists(), shown != "") == (rank == 0,) * 3
    if rank:
        return
    results = load_results("prefill.json")
    assert (results.world_size, results.rows, results.failures, results.short) == (world_size, (32, 512), (), True)
    assert results.command.startswith("benchmarks/prefill.py ")
    assert {"PEER_AR", "SEPARATE_REDUCE", "separate", "joined"} <= set(results.arms)
    assert all(one.engaged == one.calls and results.passes(one) == 3 for one in results.measurements)
    # Room was made for 512 rows beside the first 256, which are kept, and the tier of a prefill was asked for.
    assert results.at("PEER_AR", 512) is not None
    assert 0 <= (results.shared_bytes["PEER_AR"] or 0) - (512 + 256) * (48 + 16) * 2 < 4096
    assert results.selected == {32: Tier.PEER_AR, 512: Tier.SEQUENCE_PARALLEL}
    document = json.loads(Path("prefill.json").read_text())
    for m in results.rows:
        rivals = [one for one in document["measurements"] if one["tier"] is None and one["rows"] == m]
        assert min(one["over_rival"]["chained"] for one in rivals) == 1.0
    for text in ("in brackets the time over the fastest rival's", "Passes in each of 2 repetitions", "Extra memory on"):
        assert text in shown


def test_what_is_refused(main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rows", "32", "--tiers", "MNNVL_CUTEDSL"]) == 2
    assert "prefill.py: --tiers: MNNVL_CUTEDSL is not agreed" in capsys.readouterr().err
    assert main([*SMALL, "--json", str(tmp_path / "nowhere" / "x.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--seconds", "0"])
    assert caught.value.code == 2
    assert "'0' given; accepted are seconds above 0, up to 3600" in capsys.readouterr().err
