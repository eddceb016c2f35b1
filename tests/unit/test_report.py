"""What a report says of tiers that never ran on hardware: in its text, for machines, and in the doctor's notes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import pytest

from k3comm import Communicator, LatentMoESpec, Tier, cli
from k3comm.cli import doctor
from k3comm.negotiate.report import Report, not_run, not_run_of
from k3comm.testing import h200_facts

SAID = [
    "TAIL_FUSION has not run on hardware over multicast; over host and peer it has",
    "MULTIMEM_AR has not run on hardware: it needs multicast, which none here has tried",
]


@pytest.fixture
def report() -> Iterator[Report]:
    """A real one, of a rank on CPU."""
    with Communicator.negotiate(LatentMoESpec(hidden_size=64, latent_size=32, top_k=2)) as comm:
        yield comm.report


def test_it_is_what_needs_multicast_and_no_more() -> None:
    """MULTIMEM_AR has no other transport; TAIL_FUSION has others, so that its line must say which."""
    assert not_run("cuda") == SAID
    assert not_run("cpu") == []
    assert {tier for tier in Tier if not_run_of(tier)} == {Tier.TAIL_FUSION, Tier.MULTIMEM_AR}


def test_the_text_of_ranks_on_gpus_says_it(report: Report) -> None:
    lines = str(attrs.evolve(report, facts=h200_facts())).splitlines()
    assert lines[-2:] == [f"  {line}" for line in SAID]
    assert "not run on hardware" not in str(report), "on CPU there is no multicast that anybody could take"


def test_machines_are_told_of_every_tier(report: Report) -> None:
    for one in (report, attrs.evolve(report, facts=h200_facts())):
        tiers = json.loads(json.dumps(one.to_dict()))["tiers"]
        said = {name: entry["not_run_on_hardware"] for name, entry in tiers.items()}
        assert set(said) == set(Tier.__members__)
        assert [f"{name} has not run on hardware{what}" for name, what in said.items() if what] == SAID


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_doctor_notes_it(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_device", lambda asked: device)  # the facts of a GPU that is absent are unknown
    assert cli.main(["doctor", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note for note in notes if "hardware" in note] == (SAID if device == "cuda" else [])
    assert cli.main(["doctor"]) == 0
    assert (f"note: {SAID[1]}" in capsys.readouterr().out) is (device == "cuda")
