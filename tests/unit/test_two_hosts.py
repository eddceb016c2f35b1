"""Two hosts: what one vote finds out about them, what can't cross them, and what keeps working on each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from two_hosts import ADDRESSES, NAMES, two_hosts

from k3comm.testing import assert_identical

PROGRAM = Path(__file__).with_name("two_hosts_rank.py")
LIBRARY = {"SEQUENCE_PARALLEL", "COLUMN_PARALLEL", "FUSED_LANE_AR", "SEPARATE_REDUCE"}
OVER_MEMORY = {"TAIL_FUSION", "PEER_AR"}


def test_a_group_across_hosts_and_one_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3COMM_")]:
        monkeypatch.delenv(name)
    with two_hosts() as hosts:
        ended = hosts.torchrun([str(PROGRAM), str(tmp_path)], ranks_per_host=2, seconds=90, OMP_NUM_THREADS="1")
    assert [one.code for one in ended] == [0, 0], "\n".join(one.output for one in ended)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [one["host"] for one in found] == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]

    whole = assert_identical([one["whole"] for one in found])
    assert (whole["hosts"], whole["one_host"]) == ([0, 0, 2, 2], False)
    assert "4 ranks on 2 hosts" in whole["title"]
    assert whole["right"] == dict.fromkeys(LIBRARY, True)
    assert whole["refusals"].keys() == OVER_MEMORY
    for why in whole["refusals"].values():
        assert "can't cross hosts" in why

    for first in (0, 2):
        local = assert_identical([one["local"] for one in found[first : first + 2]])
        assert (local["hosts"], local["one_host"]) == ([0, 0], True)
        assert local["right"] == dict.fromkeys(LIBRARY | OVER_MEMORY, True)
        assert not local["refusals"]

    again = assert_identical([one["whole again"] for one in found])
    assert again["right"] == whole["right"]


def test_hosts_hear_each_other_over_the_cable_alone_and_nothing_is_left() -> None:
    with two_hosts() as hosts:
        ends = hosts.run([["cat", "/proc/sys/kernel/hostname", "/proc/net/fib_trie"]] * 2, seconds=10)
        assert [end.code for end in ends] == [0, 0]
        for end, name, own in zip(ends, NAMES, ADDRESSES, strict=True):
            assert end.output.startswith(f"{name}\n")
            assert own in end.output
        # The deadline ends what does not end by itself.
        start = time.monotonic()
        late, quick = hosts.run([["sleep", "60"], ["true"]], seconds=0.2)
        assert (late.code, quick.code) == (None, 0)
        assert time.monotonic() - start < 30
        namespaces = {os.readlink(f"/proc/{holder}/ns/net") for holder in hosts.holders}
        assert len(namespaces) == 2
    left = []
    for process in Path("/proc").iterdir():
        try:
            left += [process.name] if os.readlink(process / "ns/net") in namespaces else []
        except OSError:
            continue
    assert left == []


def test_what_fails_inside_leaves_nothing_either() -> None:
    holders: list[int] = []

    def fails() -> None:
        with two_hosts() as hosts:
            holders.extend(hosts.holders)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(holders) == 2
    assert [holder for holder in holders if Path(f"/proc/{holder}").exists()] == []
