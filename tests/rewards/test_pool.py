"""The worker process: it can be killed, it can't hold up the run, and it never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_lit.errors import UserError
from grpo_lit.rewards import VerifierPool, verify_math
from grpo_lit.rewards.pool import Job, WorkerPool

# Only the worker can judge these.
EQUAL = (r"\boxed{2\sin x\cos x}", r"\sin 2x")
UNEQUAL = (r"\boxed{2\sin x}", r"\sin 2x")
ENDLESS = Job(r"\sin x", r"\int_0^9 \int_0^9 \int_0^9 \sin(t^9 u^9 v^9 x) dt du dv")

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with VerifierPool() as pool:
        yield pool


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float = 30.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def kill_soon(pool: WorkerPool, times: int = 1) -> threading.Thread:
    """Kills the worker once it has been at work for a moment; its successors too, so many in all."""

    def kill() -> None:
        killed: set[int] = set()

        def another_works() -> bool:
            return bool(set(pool.pids) - killed) and any(worker.jobs for worker in pool._workers)

        for _ in range(times):
            assert wait_until(another_works)
            time.sleep(0.3)
            killed.update(pool.pids)
            os.kill(pool.pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_workers_start_only_when_needed(pool: VerifierPool) -> None:
    assert pool.verify(r"\boxed{0.5}", "1/2").method == "exact"
    assert pool.workers.pids == []
    assert pool.verify(*EQUAL).method == "worker"
    assert len(pool.workers.pids) == 1


def test_start_up_is_not_the_answers_time(pool: VerifierPool) -> None:
    start = time.perf_counter()
    verdict = pool.verify(*EQUAL, timeout_s=0.4)
    assert verdict.kind == "correct"
    assert verdict.latency_s < 0.4
    assert time.perf_counter() - start > verdict.latency_s + 0.2


def test_timeout_is_a_verdict_of_its_own_and_the_pool_goes_on() -> None:
    with WorkerPool() as pool:
        pool.judge([Job("x", r"\sin x")])
        (first,) = pool.pids
        start = time.perf_counter()
        (reply,) = pool.judge([ENDLESS], timeout_s=0.5)
        assert reply.kind == "timeout"
        assert 0.5 <= time.perf_counter() - start < 1.6
        assert pool.judge([Job(r"\sin 2x", r"2\sin x\cos x")])[0].kind == "correct"
        assert pool.pids != [first]


def test_timeout_is_remembered_for_no_more_time_than_it_had(pool: VerifierPool) -> None:
    response = rf"\boxed{{{ENDLESS.answer}}}"
    assert pool.verify(response, ENDLESS.gold, timeout_s=0.4).kind == "timeout"
    start = time.perf_counter()
    assert pool.verify(response, ENDLESS.gold, timeout_s=0.3).kind == "timeout"
    assert time.perf_counter() - start < 0.2
    assert pool.verify(response, ENDLESS.gold, timeout_s=0.6).kind == "timeout"
    assert time.perf_counter() - start > 0.6


@pytest.mark.faults
def test_killed_once_the_answer_is_judged_again(pool: VerifierPool) -> None:
    killer = kill_soon(pool.workers)
    verdict = pool.verify(rf"\boxed{{{ENDLESS.answer}}}", ENDLESS.gold, timeout_s=0.8)
    killer.join()
    assert verdict.kind == "timeout"  # not "crashed": a second worker has tried it for the whole time
    jobs = [Job(r"\sin 2x", rf"{n}\sin x\cos x") for n in range(1, 41)]
    with WorkerPool() as pool2:
        killer = kill_soon(pool2)
        replies = pool2.judge(jobs)
        killer.join()
    assert [reply.kind for reply in replies] == ["wrong", "correct", *["wrong"] * 38]


@pytest.mark.faults
def test_killed_while_it_starts_another_one_is_started() -> None:
    with WorkerPool() as pool2:
        killer = threading.Thread(
            target=lambda: wait_until(lambda: pool2.pids) and os.kill(pool2.pids[0], signal.SIGKILL)
        )
        killer.start()
        replies = pool2.judge([Job(r"\sin 2x", r"2\sin x\cos x")])
        killer.join()
    assert [reply.kind for reply in replies] == ["correct"]


@pytest.mark.faults
def test_killed_twice_in_a_job_is_a_crash_and_the_pool_goes_on(pool: VerifierPool) -> None:
    killer = kill_soon(pool.workers, times=2)
    verdict = pool.verify(rf"\boxed{{{ENDLESS.answer}}}", ENDLESS.gold, timeout_s=20.0)
    killer.join()
    assert verdict.kind == "crashed"
    assert "-9" in verdict.reason
    # A crash isn't the answer's fault for certain, so it isn't remembered.
    assert pool.verify(rf"\boxed{{{ENDLESS.answer}}}", ENDLESS.gold, timeout_s=0.3).kind == "timeout"
    assert pool.verify(*EQUAL).kind == "correct"


@pytest.mark.faults
def test_killed_while_idle_goes_unnoticed(pool: VerifierPool) -> None:
    pool.verify(*UNEQUAL)
    (pid,) = pool.workers.pids
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not pool.workers.pids)
    assert pool.verify(*EQUAL).kind == "correct"


def test_only_one_of_two_workers_dies(pool: VerifierPool) -> None:
    with WorkerPool(num_workers=2) as pool2:
        jobs = [ENDLESS, *(Job(r"\sin 2x", rf"{n}\sin x\cos x") for n in range(1, 6))]
        replies = pool2.judge(jobs, timeout_s=1.0)
    assert [reply.kind for reply in replies] == ["timeout", "wrong", "correct", "wrong", "wrong", "wrong"]


def test_many_keep_their_order_with_two_workers() -> None:
    responses = [rf"\boxed{{{n}\sin x}}" for n in range(1, 13)] + ["#### 7", r"\boxed{3\sin x}"]
    golds = [rf"{n if n % 3 else n + 1}\sin x" for n in range(1, 13)] + ["7", r"3 \cdot \sin x"]
    with VerifierPool(num_workers=2) as pool:
        verdicts = pool.verify_many(responses, golds)
        assert len(pool.workers.pids) == 2
    assert [v.correct for v in verdicts] == [bool(n % 3) for n in range(1, 13)] + [True, True]
    assert verdicts[0].extracted == r"1\sin x"


def test_threads_share_the_pool_and_signals_stay_as_they_are() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    verdicts: dict[int, list[bool]] = {}

    def work(number: int) -> None:
        pairs = [(rf"\boxed{{{number}\cos x}}", rf"{number}\cos x + {k}\tan x") for k in range(3)]
        verdicts[number] = [verify_math(*pair).correct for pair in pairs]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {number: [True, False, False] for number in range(1, 9)}
    assert signal.getsignal(signal.SIGALRM) is handler


@linux
def test_forked_child_has_workers_of_its_own() -> None:
    assert verify_math(*EQUAL).correct
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            verdicts = [verify_math(r"\boxed{\cos x}", rf"\cos x + {k}\sin x").correct for k in (0, 1)]
            os.write(writer, repr(verdicts).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answers:
        assert answers.read() == "[True, False]"
    assert os.waitpid(child, 0)[1] == 0
    assert verify_math(r"\boxed{3\sin x\cos x}", r"\frac{3}{2}\sin 2x").correct


@linux
def test_fork_while_the_worker_is_busy() -> None:
    busy = threading.Thread(target=lambda: verify_math(rf"\boxed{{{ENDLESS.answer}}}", ENDLESS.gold, timeout_s=2.0))
    verify_math(*EQUAL)
    busy.start()
    time.sleep(0.5)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for the parent's worker
        os._exit(0 if verify_math(r"\boxed{\tan x}", r"\tan x + 0\sin x").correct else 1)
    assert os.waitpid(child, 0)[1] == 0
    busy.join()


SCRIPT = r"""
import os, sys
from grpo_lit.rewards.verify import default_pool, verify_math
assert verify_math(r"\boxed{2\sin x\cos x}", r"\sin 2x").correct
print(*default_pool().workers.pids, flush=True)
"""


@linux
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "__import__('ctypes').CDLL(None).fork() or __import__('time').sleep(9); os._exit(0)",
    ],
)
def test_no_worker_outlives_the_process(ending: str) -> None:
    # A fork that Python doesn't know of holds the pipe open; the worker must leave all the same.
    command = [sys.executable, "-c", SCRIPT + ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    assert wait_until(lambda: not is_running(pid), 5.0)


def test_a_process_that_used_it_ends_at_once_and_silently() -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert time.perf_counter() - start < 45


@linux
def test_worker_is_small_and_limited(pool: VerifierPool) -> None:
    pool.verify(*EQUAL)
    (pid,) = pool.workers.pids
    assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal goes to the whole foreground session
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    space = next(line for line in limits if line.startswith("Max address space"))
    cpu = next(line for line in limits if line.startswith("Max cpu time"))
    assert space.split()[3].isdigit()
    assert cpu.split()[3].isdigit()


@linux
@pytest.mark.faults
def test_out_of_memory_is_a_crash_and_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool() as pool:
        pool.judge([Job("x", r"\sin x")])
        status = Path(f"/proc/{pool.pids[0]}/status").read_text()
    size = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
    monkeypatch.setattr("grpo_lit.rewards.pool.MEMORY_BYTES", size + (60 << 20))
    with WorkerPool() as pool:
        # Longer than any answer that verify_math lets through: the pieces of this text take hundreds of MiB.
        (reply,) = pool.judge([Job(r"\sin x", "x + " * 2_000_000)], timeout_s=20.0)
        assert (reply.kind, reply.reason) == ("crashed", "the worker process ran out of memory")
        assert pool.judge([Job(r"\sin 2x", r"2\sin x\cos x")])[0].kind == "correct"


@pytest.mark.faults
def test_interrupted_job_leaves_no_stale_answer() -> None:
    with WorkerPool() as pool:
        pool.judge([Job("x", r"\sin x")])

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGUSR1, interrupt)
        try:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                pool.judge([ENDLESS], timeout_s=20.0)
        finally:
            signal.signal(signal.SIGUSR1, old)
        assert pool.judge([Job(r"\sin 2x", r"2\sin x\cos x")])[0].kind == "correct"


@pytest.mark.parametrize(("arguments", "named"), [((0, 5.0), "num_workers"), ((1, 0.0), "timeout_s")])
def test_bad_settings_are_named(arguments: tuple[int, float], named: str) -> None:
    with pytest.raises(UserError, match=rf"^{named}="):
        VerifierPool(*arguments)


def test_lengths_must_agree(pool: VerifierPool) -> None:
    with pytest.raises(UserError, match="golds"):
        pool.verify_many(["1", "2"], ["1"])
