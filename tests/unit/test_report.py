"""What a report says of tiers that never ran on hardware, and how it shows what comes from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import pytest

from k3comm import Communicator, LatentMoESpec, Tier, cli
from k3comm.cli import doctor
from k3comm.facts import Unknown
from k3comm.negotiate.report import Explanation, Obstacle, Report, announce, not_run, not_run_of
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


# What comes from outside: names of hosts, devices and files, versions, texts of errors.

HOSTILE = "H200\x1b[2J\r\n  rank 9 here: fine\x00\x9b1m\u202e\u2028\udc80\ttab"
SHOWN = r"H200\x1b[2J\r\n  rank 9 here: fine\x00\x9b1m\u202e\u2028\udc80\ttab"


def hostile(report: Report, text: str) -> Report:
    """The report with `text` wherever something from outside stands."""
    return attrs.evolve(
        report,
        name=text,
        facts=attrs.evolve(
            report.facts, host=text, device_name=text, driver=Unknown(text), backend=text, versions={"torch": text}
        ),
        settings=attrs.evolve(report.settings, record=text, sources={**report.settings.sources, "record": text}),
        windows=attrs.evolve(report.windows, source=text),
        windows_warning=text,
        decision=attrs.evolve(report.decision, failures={Tier.PEER_AR: f"rank 0: map: {text}"}),
    )


def test_what_comes_from_outside_is_shown_escaped(report: Report) -> None:
    """No line more than without, none out of its column, and nothing that a terminal obeys."""
    plain, found = (str(hostile(report, text)).split("\n") for text in ("H200", HOSTILE))
    assert len(found) == len(plain)
    assert all(line.isprintable() for line in found)
    at = next(number for number, line in enumerate(found) if line.startswith("  tier "))
    assert [line.replace(SHOWN, "H200") for line in found[:at]] == plain[:at]
    assert sum(line.count(SHOWN) for line in found[:at]) == 9
    row = next(line for line in found if line.startswith("  PEER_AR "))
    assert row[found[at].index("why not") :] == f"rank 0: map: {SHOWN}"
    assert json.loads(json.dumps(hostile(report, HOSTILE).to_dict()))["facts"]["device_name"] == HOSTILE, "as it is"


def test_a_log_line_is_one_line_whatever_stands_in_it(report: Report, caplog: pytest.LogCaptureFixture) -> None:
    one = hostile(report, HOSTILE)
    one = attrs.evolve(one, settings=attrs.evolve(one.settings, enabled={Tier.PEER_AR}))
    with caplog.at_level("DEBUG", logger="k3comm"):
        announce(one)
    assert {record.levelname for record in caplog.records} == {"INFO", "WARNING", "DEBUG"}
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert SHOWN in record.getMessage()


def test_an_explanation_is_a_line_a_tier() -> None:
    explanation = Explanation(tier=max(Tier), forced=False, axes="4 tokens", obstacles=(Obstacle(min(Tier), HOSTILE),))
    assert str(explanation).split("\n")[1:] == [f"  not {min(Tier).name}: {SHOWN}"]
