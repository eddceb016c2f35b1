"""pytest on every rank of a torchrun job: one report, one outcome, and no hang.

    torchrun --standalone --nproc-per-node 2 -m pytest tests/distributed        (make test: for several world sizes)

Each rank is a whole pytest session over the same tests. Three things could go wrong, and are settled here.

- *Outcomes differ.* A test that fails on one rank leaves the others in a collective that nobody will join. After each
  test every rank posts its outcome and waits at most ``OUTCOME_DEADLINE`` for the others'. Unless all of them passed or
  all of them skipped, every session stops there, exits with an error and says which rank did what. A rank that does not
  answer is named, made to print the stacks of its threads, and ended by torchrun.
- *Skips differ.* A rank that skips by itself is such a difference. ``skip_all_unless(condition, reason)`` takes the
  minimum of the condition over the ranks first: all skip, or none.
- *N reports.* Rank 0 prints pytest's report as usual. The others keep theirs and print it to stderr, each line marked
  with the rank, only if something failed there (or if rank 0 is the one that does not answer).

The agreement goes through torchrun's store and not through a collective: a collective would pair up with whatever the
failed test left behind in the group, can't say who is missing, and is itself stuck once a peer is. A key per rank has
none of these faults.
"""

import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from faulthandler import register as dump_stacks_on
from faulthandler import unregister as forget_stacks_on
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
GROUP_TIMEOUT = timedelta(seconds=60)
"""How long a collective of the default group may take. Also the patience for ranks that are still importing."""
OUTCOME_DEADLINE = timedelta(seconds=100)
"""How much later than the first rank the last one may end a test: long enough for it to run into GROUP_TIMEOUT, or into
two of k3comm's own deadlines, and to say so itself."""
WAIT_SLICE = timedelta(seconds=0.1)
"""How long a collective of a test waits before it looks again."""
FAREWELL_DEADLINE = timedelta(seconds=10)
"""How long a rank of a failed session waits for the others to print what they have to say."""
LATE = f"not done {OUTCOME_DEADLINE.seconds} s after the first rank"

UNDER_TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Ranks:
    """A pytest plugin that keeps the sessions of all ranks in step."""

    def __init__(self, config: pytest.Config) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.verdict: str | None = None
        """Why the sessions stopped, the same on all ranks that could be asked."""
        self._config = config
        self._tests = 0
        self._skips = 0
        self._outcome: tuple[str, str] = ("passed", "")
        self._details: list[str] = []
        self._absent: set[int] = set()
        self._failed = True
        self._quiet = False
        self._speaker = 0
        self._stderr = os.dup(2)
        dump_stacks_on(signal.SIGUSR1, file=self._stderr, all_threads=True)
        self._held = io.StringIO()
        if self.rank != 0:
            config.option.no_header = True
            plugins = config.pluginmanager
            plugins.unregister(name="terminalreporter")
            plugins.register(pytest.TerminalReporter(config, self._held), "terminalreporter")

    @cached_property
    def store(self) -> dist.Store:
        """The job's store, made on first use: listing tests needs none."""
        store, _, _ = next(dist.rendezvous("env://", timeout=GROUP_TIMEOUT))
        store.set(f"k3comm-tests/process/{self.rank}", str(os.getpid()))
        return store

    def gather(self, question: str, answer: str, deadline: timedelta = OUTCOME_DEADLINE) -> list[str | None]:
        """Every rank's answer in rank order; None for a rank that gave none in time, which is not waited for again."""
        question = f"{self._tests}/{question}"
        self._post(question, answer)
        end = time.monotonic() + deadline.total_seconds()
        return [self._read(question, peer, end - time.monotonic()) for peer in range(self.size)]

    def _post(self, question: str, answer: str) -> None:
        self.store.set(f"k3comm-tests/{question}/{self.rank}", answer)

    def _read(self, question: str, peer: int, seconds: float) -> str | None:
        # Asks again and again: a blocking wait of the store that times out prints warnings of its own.
        key = f"k3comm-tests/{question}/{peer}"
        end = time.monotonic() + (0 if peer in self._absent else seconds)
        try:
            while not self.store.check([key]):
                if time.monotonic() >= end:
                    self._absent.add(peer)
                    return None
                time.sleep(0.002)
            return self.store.get(key).decode()
        except dist.DistError:
            self._absent.add(peer)
            return None

    def skip_all_unless(self, condition: bool, reason: str) -> None:
        """Skip the test on all ranks unless `condition` holds on all of them. Collective."""
        self._skips += 1
        answers = self.gather(f"skip-{self._skips}", "1" if condition else "0")
        if None in answers:
            pytest.fail(f"{_ranks(answers, None)} did not answer whether to skip: {reason}", pytrace=False)
        if "0" in answers:
            everywhere = answers.count("0") == self.size
            pytest.skip(reason if everywhere else f"{reason} (on {_ranks(answers, '0')})")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        answers = self.gather("barrier", "here")
        if None in answers:
            pytest.fail(f"{_ranks(answers, None)} did not come to the end of the session", pytrace=False)

    def _stop(self, session: pytest.Session, verdict: str, details: list[str]) -> None:
        self.verdict = verdict
        self._details = details
        session.shouldfail = verdict

    def _show_where_the_absent_are(self) -> None:
        # They are blocked, likely in C++: only a handler that needs no interpreter gets their stacks, and only now, as
        # the first rank that leaves breaks the connections that they wait on.
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
            return
        for peer in sorted(self._absent):
            process = self._read("process", peer, 0)
            if process is not None:
                os.write(self._stderr, f"\n[rank {peer}] is here:\n".encode())
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGUSR1)
                time.sleep(0.5)

    # hooks of the session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks run the same tests in the same order, or none."""
        if self._config.option.collectonly:
            return
        ids = [item.nodeid for item in session.items]
        digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
        answers = self.gather(
            "tests", f"{len(ids)} tests, {session.testsfailed} errors, order {digest}", deadline=GROUP_TIMEOUT
        )
        if len(set(answers)) > 1:
            details = [answer or "no answer" for answer in answers]
            self._stop(session, "the ranks did not collect the same tests", details)
            raise session.Failed(session.shouldfail)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run the test, its set-up and its teardown, then agree on how it went."""
        self._tests += 1
        self._skips = 0
        self._outcome = ("passed", "")
        result = yield
        outcomes: list[str] = []
        details: list[str] = []
        for text in self.gather("outcome", json.dumps(self._outcome)):
            outcome, detail = json.loads(text) if text is not None else ("missing", LATE)
            outcomes.append(outcome)
            details.append(f"{outcome}: {detail}" if detail else outcome)
        if len(set(outcomes)) > 1 or outcomes[0] in ("failed", "missing"):
            parts = [f"{kind} on {_ranks(outcomes, kind)}" for kind in sorted(set(outcomes))]
            self._stop(item.session, f"{item.nodeid}: {'; '.join(parts)}", details)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the worst of set-up, call and teardown."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).strip().splitlines()
            self._outcome = ("failed", f"{lines[0][:300] if lines else 'no text'} (in {report.when})")
        elif report.skipped and self._outcome[0] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._outcome = ("xfailed" if hasattr(report, "wasxfail") else "skipped", reason[:300])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What each rank said, where they stopped."""
        if self.verdict:
            terminalreporter.section("ranks")
            for rank, answer in enumerate(self._details):
                terminalreporter.line(f"rank {rank}: {answer}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Note whether this rank has something to tell: its own failure, or everybody's where rank 0 can't speak."""
        self._failed = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        self._speaker = min(set(range(self.size)) - self._absent)
        self._quiet = exitstatus == pytest.ExitCode.TESTS_FAILED and not session.testsfailed

    def pytest_unconfigure(self) -> None:
        """Rank after rank tells what it held back, and all leave together: torchrun ends the others after the first."""
        if self._failed:
            in_step = "store" in self.__dict__
            before = [rank for rank in range(self.rank) if rank not in self._absent]
            if in_step and before:
                self._read("farewell", before[-1], FAREWELL_DEADLINE.total_seconds())
            if self.rank == self._speaker or not self._quiet:
                lines = self._held.getvalue().splitlines(keepends=True)
                os.write(self._stderr, "".join(f"[rank {self.rank}] {line}" for line in lines).encode())
            sys.stdout.flush()
            sys.stderr.flush()
            if in_step:
                if self.rank == self._speaker:
                    self._show_where_the_absent_are()
                self._post("farewell", "printed")
                for peer in range(self.size):
                    self._read("farewell", peer, FAREWELL_DEADLINE.total_seconds())
        forget_stacks_on(signal.SIGUSR1)
        os.close(self._stderr)


def _ranks(answers: Sequence[str | None], which: str | None) -> str:
    ranks = [str(rank) for rank, answer in enumerate(answers) if answer == which]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


_RANKS = pytest.StashKey[Ranks]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the tensors are."""
    parser.addoption(
        "--shared-gpu",
        action="store_true",
        help="tensors on GPUs that several ranks may share, gloo for collectives; torch's symmetric memory allows it, "
        "without multicast",
    )
    parser.addoption(
        "--nccl", action="store_true", help="a GPU and NCCL for every rank (test_tiers.py), else CPU and gloo"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take the session in hand where there are peers."""
    if UNDER_TORCHRUN:
        config.stash[_RANKS] = ranks = Ranks(config)
        config.pluginmanager.register(ranks, "k3comm-ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without peers these tests mean nothing: skip them, and say how to run them."""
    if not UNDER_TORCHRUN:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs several ranks; run under torchrun: make test"))


def _look_again_while_waiting() -> None:
    """Lets gloo's waits look again now and then.

    On a busy machine a wait with a limit of 30 s once ended well after 30 s: the work was done long before, and the
    wake-up was lost below torch. Peers had given up by then.
    """
    wait = dist.Work.wait

    def wait_in_slices(work: dist.Work, timeout: timedelta | None = None) -> bool:
        end = time.monotonic() + (timeout or GROUP_TIMEOUT).total_seconds()
        while not work.is_completed() and time.monotonic() < end:
            with suppress(RuntimeError):  # the slice is over, or the work failed: asked below
                wait(work, WAIT_SLICE)
        return wait(work, WAIT_SLICE)

    dist.Work.wait = wait_in_slices


@pytest.fixture(scope="session", autouse=True)
def _process_group(request: pytest.FixtureRequest) -> Generator[None]:
    """The default group: gloo over the job's store, one computing thread a rank; with --nccl also a GPU a rank."""
    ranks = request.config.stash[_RANKS]
    torch.set_num_threads(1)
    nccl = request.config.getoption("--nccl")
    if not nccl:  # NCCL's waits return at once, and those with a limit block the host
        _look_again_while_waiting()
    shared_gpu = request.config.getoption("--shared-gpu")
    if shared_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if nccl:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "cpu:gloo,cuda:gloo" if shared_gpu else "gloo",
        store=dist.PrefixStore("default-group", ranks.store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=GROUP_TIMEOUT,
    )
    yield
    # After a failure a peer may be stuck in this group or gone: then the process just ends.
    if ranks.verdict is None:
        ranks.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """This rank in the default group."""
    return request.config.stash[_RANKS].rank


@pytest.fixture(scope="session")
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks."""
    return request.config.stash[_RANKS].size


@pytest.fixture
def gpu(request: pytest.FixtureRequest, skip_all_unless: Callable[[bool, str], None]) -> torch.device:
    """This rank's GPU; skips on all ranks where the session has none."""
    option = request.config.getoption
    skip_all_unless(option("--nccl") or option("--shared-gpu"), "needs --nccl (a GPU a rank) or --shared-gpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def skip_all_unless(request: pytest.FixtureRequest) -> Callable[[bool, str], None]:
    """``skip_all_unless(condition, reason)``: skip on all ranks unless the condition holds on all. Collective."""
    return request.config.stash[_RANKS].skip_all_unless
