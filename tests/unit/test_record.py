"""The decision recorder, the report that compares its files, and the lines that negotiate logs."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, InputError, LatentMoESpec, Settings, SettingsError, Tier, cli
from k3comm.cli.report import compare
from k3comm.negotiate.report import announce
from k3comm.record import CLOSED, MAGIC, MAX_LINE, CallRecord, Record, Recorder, check_folder, parse_call, records_in
from k3comm.testing import run_ranks

SPEC = LatentMoESpec(hidden_size=24, latent_size=8, top_k=2, dtype="float32")
CALL = {
    "call": 7, "part": "tail", "layer": 3, "num_tokens": 64, "graph": False, "decode": True, "output": "full",
    "next_norm": False, "residual": True, "lane": 0, "norm": True, "bias": False, "up": "whole", "precise": False,
    "scale": 1.0, "capture": False, "tier": "FUSED_LANE_AR", "by": "selected",
}  # fmt: skip
LINE = (
    "call=7 part=tail layer=3 num_tokens=64 graph=0 decode=1 output=full next_norm=0 residual=1 lane=0 norm=1 bias=0 "
    "up=whole precise=0 scale=1.0 capture=0 tier=FUSED_LANE_AR by=selected"
)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3COMM_")]:
        monkeypatch.delenv(name)


def solo(folder: Path, name: str = "solo") -> Communicator:
    return Communicator.negotiate(SPEC, settings=Settings(record=folder), name=name)


def calls(folder: Path, name: str) -> list[dict[str, str]]:
    return [parse_call(line) for line in Record.of(folder / name).lines() if line != CLOSED]


# The file


def test_a_line_is_fixed_and_read_back() -> None:
    assert CallRecord(**CALL).line() == LINE
    assert parse_call(LINE) == {
        name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in CALL.items()
    }


def test_a_call_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    comm = solo(tmp_path / "deep" / "folder", "base model/1")
    file = tmp_path / "deep" / "folder" / "base%20model%2F1.rank0.log"
    tail = comm.moe_tail(layer_index=5, norm_weight=torch.ones(8), up_weight=torch.zeros(24, 8))
    lines = len(file.read_text().splitlines())
    with comm.step(graph=True, decode=True):
        tail(torch.zeros(2, 8), torch.zeros(2, 24))
    assert len(file.read_text().splitlines()) == lines + 1, "flushed while the communicator is open"
    tail(torch.zeros(0, 8), torch.zeros(0, 24), torch.zeros(0, 24), output="rows")
    tail.finish(tail.reduce_routed(torch.zeros(3, 8)), torch.zeros(3, 24), next_norm_weight=torch.ones(24))
    plan = tail.plan(9, decode=True, tier=Tier.SEPARATE_REDUCE)
    tail(torch.zeros(4, 8), torch.zeros(4, 24), plan=plan)
    found = calls(file.parent, file.name)
    assert [one["call"] for one in found] == ["0", "1", "2", "3", "4"]
    assert [one["part"] for one in found] == ["tail", "tail", "reduce", "finish", "tail"]
    assert [one["num_tokens"] for one in found] == ["2", "0", "3", "3", "4"]
    assert [one["by"] for one in found] == ["selected", "selected", "forced", "forced", "plan-forced"]
    assert [(one["graph"], one["decode"]) for one in found] == [("1", "1"), *[("0", "0")] * 3, ("0", "1")]
    assert [one["next_norm"] for one in found] == ["0", "0", "0", "1", "0"]
    assert [(one["output"], one["residual"]) for one in found[:2]] == [("full", "0"), ("rows", "1")]
    assert {one["layer"] for one in found} == {"5"}
    assert {one["tier"] for one in found} == {"SEPARATE_REDUCE"}
    comm.close()
    comm.close()
    assert file.read_text().splitlines()[-1] == CLOSED
    assert file.read_text().count(CLOSED) == 1


def test_a_compiled_model_is_recorded_when_it_runs(tmp_path: Path) -> None:
    comm = solo(tmp_path, "compiled")
    weight = torch.zeros(24, 8)
    comm.moe_tail(layer_index=0, up_weight=weight)
    operator = torch.ops.k3comm.moe_tail
    for rows in (3, 1):
        operator(torch.zeros(rows, 8), torch.zeros(rows, 24), None, None, weight, None, "full", 0, "compiled")
    assert [(one["call"], one["num_tokens"]) for one in calls(tmp_path, "compiled.rank0.log")] == [
        ("0", "3"),
        ("1", "1"),
    ]


def test_the_header_says_what_was_agreed_and_nothing_of_the_rank(tmp_path: Path) -> None:
    with solo(tmp_path):
        pass
    lines = (tmp_path / "solo.rank0.log").read_text().splitlines()
    assert lines[0] == MAGIC
    record = Record.of(tmp_path / "solo.rank0.log")
    assert record.rank == 0
    assert list(record.header) == ["communicator", "group", "version", "windows", "settings", "tiers"]
    assert record.header["communicator"] == "solo"
    assert record.header["version"] == k3comm.__version__
    assert record.header["tiers"] == "SEPARATE_REDUCE"
    assert "record" not in record.header["settings"], "a folder may be one rank's own"
    assert record.header["windows"].startswith("family host, world size any, rows ")


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    for rows in (1, 2, 3):
        with solo(tmp_path) as comm:
            tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(24, 8))
            tail(torch.zeros(rows, 8), torch.zeros(rows, 24))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["solo.rank0.log", "solo.rank0.log.old"]
    assert [one["num_tokens"] for one in calls(tmp_path, "solo.rank0.log")] == ["3"]
    assert [one["num_tokens"] for one in calls(tmp_path, "solo.rank0.log.old")] == ["2"]


def test_a_folder_that_can_not_be_written_to_is_refused_before_the_vote(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingsError, match=r"^record: '.*' given; accepted is a folder that can be written to \("):
            solo(folder)
    check_folder(None)
    check_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_ends_the_record_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    recorder = Recorder.__new__(Recorder)
    recorder.path, recorder._process = Path("/dev/full"), os.getpid()
    recorder._file = open("/dev/full", "wb", buffering=0)  # type: ignore[assignment]  # noqa: SIM115
    with caplog.at_level(logging.WARNING, "k3comm"):
        recorder.write("call=0")
        recorder.write("call=1")
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the record in /dev/full ends here: [Errno 28] No space left on device"
    ]


def test_a_file_that_vanishes_with_its_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "k3comm"):
        recorder = Recorder(tmp_path / "gone", "base", 0, {})
    recorder.write("call=0")
    assert len(caplog.records) == 1
    assert "No such file or directory" in caplog.text


# The report


def written(folder: Path, rank: int, lines: list[str], *, name: str = "base", group: str = "0 1 2") -> Path:
    recorder = Recorder(folder, name, rank, {"communicator": name, "group": group})
    for line in lines:
        if line == CLOSED:
            recorder.close()
        else:
            recorder.write(line)
    return recorder.path


def changed(**changes: object) -> str:
    return CallRecord(**{**CALL, **changes}).line()


def report(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, str]:
    code = cli.main(["report", *map(str, paths)])
    return code, capsys.readouterr().out


def test_files_that_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(3):
        written(tmp_path, rank, [changed(call=0), changed(call=1, by=f"{'plan-' if rank else ''}selected"), CLOSED])
    assert report(capsys, tmp_path) == (0, "base, ranks 0, 1 and 2: 2 calls, the same on all\n")


def test_what_stands_in_a_file_is_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        lines = [f"{changed(num_tokens=rank)} \x1b[2J{rank}\r"]
        written(tmp_path, rank, lines, name="a\x1b]0;b", group="0 1")
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.startswith(r"a\x1b]0;b, ranks 0 and 1: ")
    assert r"by=selected \x1b[2J0\r" in text


def test_the_first_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [changed(call=number) for number in range(4)]
    for rank in range(3):
        odd = changed(call=4, num_tokens=5 if rank == 1 else 4, tier="TAIL_FUSION" if rank == 1 else "PEER_AR")
        written(tmp_path, rank, [*same, odd, changed(call=5, layer=rank)])
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert text.splitlines()[:2] == [
        "base, ranks 0, 1 and 2: the same for 4 calls, then DIFFERENT",
        "  rank 1: num_tokens 5, the others 4; rank 1: tier TAIL_FUSION, the others PEER_AR",
    ]
    assert text.splitlines()[3] == f"  rank 1: {changed(call=4, num_tokens=5, tier='TAIL_FUSION')}"


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (([0, 1], [0], [0, 1]), "rank 1: no further call, and not closed (killed, or stuck in the call before)"),
        (([0, 1], [0, CLOSED], [0, 1]), "rank 1: closed"),
        (([0, CLOSED], [0], [0, CLOSED]), "rank 1: not closed, unlike ranks 0 and 2"),
    ],
)
def test_a_file_that_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ends: tuple[list[object], ...], expected: str
) -> None:
    for rank, end in enumerate(ends):
        written(tmp_path, rank, [changed(call=one) if isinstance(one, int) else str(one) for one in end])
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert text.splitlines()[1] == f"  {expected}"


def test_a_line_that_was_cut_off_is_no_call(tmp_path: Path) -> None:
    path = written(tmp_path, 0, [changed(call=0)])
    with path.open("a") as file:
        file.write(changed(call=1)[:-3])
    assert [parse_call(line)["call"] for line in Record.of(path).lines()] == ["0"]


def test_communicators_are_kept_apart_and_absent_ranks_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        written(tmp_path, rank, [changed(layer=1)], name="base", group="0 1 5")
        written(tmp_path, rank, [changed(layer=2)], name="draft", group="0 1")
    assert report(capsys, tmp_path) == (
        3,
        "base, ranks 0 and 1: 1 calls, the same on these, and not known of the others\n  MISSING: no record of rank 5\n"
        "draft, ranks 0 and 1: 1 calls, the same on all\n",
    )


def test_a_rank_that_was_ended_before_its_header_is_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        written(tmp_path, rank, [changed(num_tokens=4)])
    (tmp_path / "base.rank2.log").write_text("")
    code, text = report(capsys, tmp_path)
    assert code == 3
    assert text.splitlines()[1:] == [
        "  MISSING: no record of rank 2",
        f"{tmp_path / 'base.rank2.log'}: empty: rank 2 was ended before it had written its header",
    ]
    (tmp_path / "base.rank1.log").write_text((tmp_path / "base.rank1.log").read_text().replace("=4", "=5"))
    assert report(capsys, tmp_path)[0] == 1, "the others are compared, and a difference is the worse finding"


@pytest.mark.parametrize("odd", ["garbage two", "", LINE + " call=7", LINE.replace("lane=0", "lane_0")])
def test_lines_that_are_no_calls_and_differ_are_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
    for rank in range(3):
        written(tmp_path, rank, [odd if rank == 1 else LINE if "call" in odd else "garbage one"])
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert "the same on all" not in text


def test_names_that_nobody_gave_are_matched_by_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 0, [changed()], name="k3comm-0", group="0")
    for count, tokens in ((0, 4), (1, 5), (10, 6)):
        written(tmp_path, 0, [changed(num_tokens=tokens)], name=f"k3comm-{count + 1}", group="0 1")
        written(tmp_path, 1, [changed(num_tokens=tokens)], name=f"k3comm-{count}", group="0 1")
    code, text = report(capsys, tmp_path)
    assert code == 0, text
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        "k3comm-0, rank 0",
        "k3comm-1, k3comm-0, ranks 0 and 1",
        "k3comm-11, k3comm-10, ranks 0 and 1",
        "k3comm-2, k3comm-1, ranks 0 and 1",
    ]


def test_a_header_of_other_digits_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        written(tmp_path, rank, [changed()], group="0 1 ²")
    assert report(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize("name", [chr(0xDCFF), "a" + chr(0xD800), "a\nb", "x" * 300])
def test_any_name_is_recorded_or_said_not_to_be(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, name, 0, {"communicator": name, "group": "0"})
    recorder.write(LINE)
    recorder.close()
    if len(name) > 255:
        assert "File name too long" in caplog.text
    else:
        assert report(capsys, tmp_path)[0] == 0


def test_headers_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, version in enumerate(("0.1.0", "0.2.0")):
        Recorder(tmp_path, "base", rank, {"communicator": "base", "version": version}).close()
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert "header, version: 0.1.0 on rank 0; 0.2.0 on rank 1" in text


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        written(tmp_path, rank, [changed(num_tokens=rank)], group="0 1")
    assert cli.main(["report", "--json", str(tmp_path)]) == 1
    (found,) = json.loads(capsys.readouterr().out)["communicators"]
    assert found["communicator"] == "base"
    assert (found["calls"], found["ranks"], found["absent"]) == (0, [0, 1], [])
    assert found["difference"] == "num_tokens: 0 on rank 0, 1 on rank 1"
    assert found["lines"]["1"] == changed(num_tokens=1)


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.rank0.log").write_text("hello\n")
    (tmp_path / "y.log").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "z.rank0.log").write_text("")
    os.mkfifo(tmp_path / "pipe.rank0.log")
    (tmp_path / "endless.rank0.log").symlink_to("/dev/zero")
    (tmp_path / "long.rank0.log").write_text("x" * (MAX_LINE + 1) + "\n")
    for name, expected in (
        ("pipe.rank0.log", "accepted are regular files"),
        ("endless.rank0.log", "accepted are regular files"),
        ("long.rank0.log", f"a line of more than {MAX_LINE} characters"),
        ("nowhere", "can't be read: No such file or directory"),
        ("x.rank0.log", "line 1: 'hello'; accepted is '# k3comm record 1'"),
        ("y.log", "accepted are a recorder's files, which end in .rank<number>.log"),
        ("z.rank0.log", "this one has no header"),
        ("empty", "there is no recorder's file in this folder"),
        ("nowhere.rank3.log", "can't be read: No such file or directory"),
    ):
        assert cli.main(["report", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert expected in captured.err
    (tmp_path / "other").mkdir()
    twice = records_in([written(tmp_path, 3, []), written(tmp_path / "other", 3, [])])
    with pytest.raises(InputError, match="two files of one rank"):
        compare(twice)


def test_the_report_loads_no_torch(tmp_path: Path) -> None:
    written(tmp_path, 0, [changed()], group="0")
    program = f"""
import sys
from k3comm.cli import main
assert main(["report", {str(tmp_path)!r}]) == 0
print([name for name in ("torch", "numpy") if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]\n")


# Several ranks: two files differ at exactly the line at which the ranks parted, and INFO comes from one rank


def recording_job(folder: str) -> dict[str, object]:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    found: dict[str, object] = {}
    with LogLines() as lines:
        comm = Communicator.negotiate(
            SPEC,
            dist.group.WORLD,
            settings=Settings(record=folder, disabled={Tier.COLUMN_PARALLEL}, enabled={Tier.MNNVL_CUTEDSL}),
            name="base",
        )
        found["world"] = list(lines.found)
        if rank:
            lines.found.clear()
            Communicator.negotiate(SPEC, group, settings=Settings(record=folder), name="pair").close()
            found["pair"] = list(lines.found)
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(24, 8))
    for number in range(4):
        # One tier by name, so that the difference does not hang.
        with comm.step(decode=rank == 1 and number == 2):
            tail(torch.zeros(3, 8), torch.zeros(3, 24), plan=tail.plan(3, *comm.axes, Tier.SEPARATE_REDUCE))
    comm.close()
    return found


class LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))

    def __enter__(self) -> "LogLines":
        logging.getLogger("k3comm").addHandler(self)
        logging.getLogger("k3comm").setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("k3comm").removeHandler(self)
        logging.getLogger("k3comm").setLevel(logging.NOTSET)


def test_ranks_record_the_same_but_for_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_ranks(recording_job, 3, str(tmp_path), deadline=60)
    files = [(tmp_path / f"base.rank{rank}.log").read_text().splitlines() for rank in range(3)]
    assert files[0] == files[2]
    differing = [(one, two) for one, two in zip(files[0], files[1], strict=True) if one != two]
    assert len(differing) == 1, "diff shows exactly the line at which the ranks parted"
    assert "call=2 " in differing[0][0]
    code, text = report(capsys, tmp_path)
    assert code == 1
    assert "base, ranks 0, 1 and 2: the same for 2 calls, then DIFFERENT\n  rank 1: decode 1, the others 0\n" in text
    assert "pair, ranks 1 and 2: 0 calls, the same on all" in text, "files are named by the rank in the job"

    speaker, *silent = (one["world"] for one in found)
    assert silent == [[], []]
    info = [text for level, text in speaker if level == "INFO"]
    assert info == [
        "base: SEQUENCE_PARALLEL, FUSED_LANE_AR, SEPARATE_REDUCE agreed, best first, of "
        f"{', '.join(tier.name for tier in Tier)}; for ranks 0, 1, 2 of the job; windows host.toml (host)"
    ]
    assert [text for level, text in speaker if level == "WARNING"] == [
        "base: MNNVL_CUTEDSL is asked for by name (enabled, argument) and not agreed: not part of this version"
    ]
    debug = [text for level, text in speaker if level == "DEBUG"]
    assert "base: not COLUMN_PARALLEL: disabled in the settings (disabled, K3COMM_DISABLE)" in debug
    assert len(debug) == len(Tier) - 3 - 1
    assert found[2]["pair"] == [], "rank 0 of the group speaks, which is rank 1 of the job"
    (info,) = [text for level, text in found[1]["pair"] if level == "INFO"]
    assert info.startswith("pair: ")
    assert info.endswith("for ranks 1, 2 of the job; windows host.toml (host)")


# The log


def test_windows_of_another_world_size_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    import attrs

    report = attrs.evolve(Communicator.negotiate(SPEC).report, windows_warning="no windows for 3 ranks")
    with caplog.at_level(logging.DEBUG, "k3comm"):
        announce(report)
        announce(attrs.evolve(report, rank=1))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{report.name}: no windows for 3 ranks"
    ]
    assert len([record for record in caplog.records if record.levelname == "INFO"]) == 1


def test_the_library_stays_silent_by_itself() -> None:
    program = """
import logging, k3comm
from k3comm import Communicator, LatentMoESpec
kinds = [type(handler).__name__ for handler in logging.getLogger("k3comm").handlers]
assert kinds == ["NullHandler"] and not logging.root.handlers, kinds
Communicator.negotiate(LatentMoESpec(hidden_size=24, latent_size=8, top_k=2)).close()
logging.getLogger("k3comm").warning("nobody asked")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_off_costs_nothing_but_a_look() -> None:
    assert Communicator.negotiate(SPEC)._observer is None
    assert Communicator.negotiate(SPEC, settings=Settings(check_uniform=True))._observer is None, "one rank is alike"


def test_a_forked_child_leaves_the_record_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "one", 0, {"name": "one"})
    child = os.fork()
    if child == 0:
        try:
            recorder.write("call=0 of a child")
            recorder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    recorder.write("call=0")
    recorder.close()
    assert recorder.path.read_text().splitlines()[-2:] == ["call=0", CLOSED]
