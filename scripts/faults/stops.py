"""Processes that are killed, asked to stop, or in each other's way; clocks that jump."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from faults.lab import DDP, LIMIT_S, STEPS, Lab, NotPossibleError, Outcome, Running, fault, said

STOPPED = "stopping as asked; resume with --ckpt_path last"
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) { static int turn; return __sync_fetch_and_add(&turn, 1) % 2 ? 86400 : -86400; }
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
"""


def _resumed(lab: Lab, running: Running, code: int | None) -> Outcome:
    """Go on after a kill, compare, tidy up."""
    lab.resume(running.root)
    lost = lab.difference(running.root)
    if left := [file.name for file in (running.root / "checkpoints").glob(".*.tmp")]:
        lost = f"{left} left behind"
    shutil.rmtree(running.root)
    return Outcome(lost, "(nothing; the resume samples the step again)", code)


@fault("SIGKILL at a random moment, resumed", tries=20)
def sigkill(lab: Lab, number: int) -> Outcome:
    """Moments spread over loading, validation, sampling, training, writing and exporting."""
    numbers = random.Random(number)
    while True:
        running = lab.start(lab.fresh("sigkill"))
        running.wait_for_lines(numbers.randrange(STEPS + 1))
        time.sleep(numbers.random() * 0.4)
        running.process.kill()
        if running.process.wait() == -signal.SIGKILL:  # and not at its end already
            return _resumed(lab, running, -signal.SIGKILL)


@fault("SIGKILL while a checkpoint is being written, resumed", tries=5)
def sigkill_in_checkpoint(lab: Lab, number: int) -> Outcome:
    """At the first sight of the temporary file of a checkpoint."""
    running = lab.start(lab.fresh("in_checkpoint"))
    running.wait_for_lines(1 + number)
    folder = running.root / "checkpoints"
    while running.process.poll() is None:
        if folder.is_dir() and any(name.endswith(".tmp") for name in os.listdir(folder)):
            break
    running.process.kill()
    code = running.process.wait()
    assert list(folder.glob(".*.tmp")), "the checkpoint was complete before the signal came"
    return _resumed(lab, running, code)


def _asked(lab: Lab, name: signal.Signals, number: int, times: int = 1) -> Outcome:
    running = lab.start(lab.fresh(name.name))
    running.wait_for_lines(1 + number)
    for _ in range(times):
        running.process.send_signal(name)
        time.sleep(0.1)
    text = running.end()
    assert running.process.returncode == 0, text[-2000:]
    assert STOPPED in text, text[-2000:]
    lab.resume(running.root)
    return Outcome(lab.difference(running.root), f"{name.name}: finishing this step, then saving ... {STOPPED}", 0)


@fault("SIGTERM after each step, resumed", tries=STEPS - 1)
def sigterm(lab: Lab, number: int) -> Outcome:
    """The step is finished and saved; where a validation would follow, the resumed run makes it."""
    return _asked(lab, signal.SIGTERM, number)


@fault("Ctrl-C after each step, resumed", tries=STEPS - 1)
def ctrl_c(lab: Lab, number: int) -> Outcome:
    """As SIGTERM."""
    return _asked(lab, signal.SIGINT, number)


@fault("two SIGTERMs in a row, resumed")
def two_sigterms(lab: Lab, number: int) -> Outcome:
    """The second one changes nothing."""
    return _asked(lab, signal.SIGTERM, 2, times=2)


@fault("Ctrl-C twice: stop at once, resumed")
def two_ctrl_c(lab: Lab, number: int) -> Outcome:
    """The second one breaks the step off."""
    running = lab.start(lab.fresh("two_ctrl_c"), env={"FAULT": "hangs"})
    running.wait_for_lines(3)
    time.sleep(1.0)
    for _ in range(2):
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    text = running.end()
    lab.resume(running.root)
    return Outcome(lab.difference(running.root), said(text), running.process.returncode)


@fault("SIGTERM or Ctrl-C while the model loads or before the first step, started again", tries=6)
def stopped_early(lab: Lab, number: int) -> Outcome:
    """Before there is anything to save."""
    running = lab.start(lab.fresh("early"))
    while not running.root.exists() and running.process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3 * (number % 3))
    running.process.send_signal((signal.SIGTERM, signal.SIGINT)[number // 3])
    text = running.end()
    assert "Traceback" not in text, text[-2000:]
    lab.resume(running.root)
    words = STOPPED if STOPPED in text else said(text)
    return Outcome(lab.difference(running.root), words, running.process.returncode)


@fault("verifier's worker process killed while it judges", tries=8)
def verifier_killed(lab: Lab, number: int) -> Outcome:
    """Every answer goes to the worker; once it has worked for a moment, it is killed."""
    rewards = "--model.rewards=[math_accuracy,fault_rewards.for_the_worker]"
    reference = lab.reference(rewards, name="reference_verifier")
    numbers = random.Random(number)
    running = lab.start(lab.fresh("verifier"), rewards)
    running.wait_for_lines(1 + number % (STEPS - 1))
    killed = False
    while not killed and running.process.poll() is None:
        time.sleep(numbers.random() * 0.1)
        for pid in _children(running.process.pid):
            if b"rewards/worker.py" in _command_line(pid):
                os.kill(pid, signal.SIGKILL)
                killed = True
    text = running.end()
    assert running.process.returncode == 0, text[-2000:]
    assert killed, "no worker was running"
    return Outcome(lab.difference(running.root, reference), "(nothing: the answer is judged again)", 0)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@fault("one of two ranks killed (SIGKILL): the other ends within a minute; resumed", tries=4)
def rank_killed(lab: Lab, number: int) -> Outcome:
    """Rank 0 and rank 1 in turn, over gloo."""
    reference = lab.reference(*DDP, name="reference_ranks")
    running = lab.start(lab.fresh("ranks"), *DDP)
    running.wait_for_lines(2)
    other = next(
        pid
        for pid in _children(running.process.pid)
        if b"LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    time.sleep(random.Random(number).random())
    os.kill((running.process.pid, other)[number % 2], signal.SIGKILL)
    killed = time.monotonic()
    running.process.wait(LIMIT_S)
    while Path(f"/proc/{other}/stat").exists() and b"grpo_lit" in _command_line(other):
        assert time.monotonic() - killed < LIMIT_S, "rank 1 goes on"
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    assert seconds < 60, f"the other rank ended after {seconds:.0f} s"
    text = running.log.read_text()
    assert "Traceback" not in text, text[-3000:]
    words = [line.strip() for line in text.splitlines() if "rank" in line and str(number % 2) in line][-1]
    lab.resume(running.root, *DDP)
    lost = lab.difference(running.root, reference)
    return Outcome(lost, f"after {seconds:.0f} s: {words}", running.process.returncode)


@fault("two runs into one folder", tries=2)
def two_runs(lab: Lab, number: int) -> Outcome:
    """The second one starts afresh, or resumes; the first one goes on."""
    running = lab.start(lab.fresh("two"))
    running.wait_for_lines(2)
    second = lab.run(running.root, *(["--ckpt_path=last"] if number else []))
    text = running.end()
    assert running.process.returncode == 0, text[-2000:]
    assert second.returncode == 2, second.stdout
    return Outcome(lab.difference(running.root), said(second.stderr), second.returncode)


@fault("clock that jumps by two days at every look at it")
def clock_jumps(lab: Lab, number: int) -> Outcome:
    """A preloaded library answers for the system's clock, in every process of the run."""
    library, source = lab.folder / "clock.so", lab.folder / "clock.c"
    source.write_text(CLOCK)
    if shutil.which("cc") is None:
        raise NotPossibleError("needs a C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    root = lab.fresh("clock")
    done = lab.run(root, env={"LD_PRELOAD": str(library)})
    assert done.returncode == 0, done.stderr[-2000:]
    return Outcome(lab.difference(root), "(nothing)", 0)
