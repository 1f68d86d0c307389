"""The live page of a real run, asked over HTTP and looked at in a browser."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra 'live'")
pytest.importorskip("starlette", reason="needs the extra 'live'")

from grpo_lit.callbacks.live_page import LivePage
from grpo_lit.cli.train import build
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.live.app import MAX_BODY_BYTES, create_app
from grpo_lit.live.server import LiveServer
from grpo_lit.live.state import CHANNELS, LiveState
from grpo_lit.live.trace import SAFE_BYTES, Refused, TraceControl, TraceRequest
from grpo_lit.memory.plan import GIB

Fit = Callable[..., Sequence[str]]
JSON = {"Content-Type": "application/json"}


def ask(
    port: int, path: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {**(JSON if method == "POST" else {}), **(headers or {})})
        answer = connection.getresponse()
        raw = answer.read()
        is_json = "json" in answer.headers.get("Content-Type", "")
        return answer.status, json.loads(raw) if is_json and raw else raw.decode()
    finally:
        connection.close()


class Job:
    """A small training with its page, in a thread; it ends when told to."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.cli = build("fit", list(arguments)[1:])
        self.page = next(c for c in self.cli.trainer.callbacks if isinstance(c, LivePage))  # type: ignore[attr-defined]
        self.thread = threading.Thread(
            target=self.cli.trainer.fit, args=(self.cli.model,), kwargs={"datamodule": self.cli.datamodule}
        )
        self.thread.start()
        self.wait(lambda: self.page.server is not None)
        assert self.page.server is not None
        self.port = self.page.server.port

    def wait(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "timed out"
            assert self.thread.is_alive(), "the run ended"
            time.sleep(0.02)

    def start(self, request: dict[str, Any]) -> int:
        """Ask for a trace until it is taken: on a busy machine slow steps make the estimate too large for a while."""
        request = {**request, "safe": False}
        end = time.monotonic() + 60
        while (code := ask(self.port, "/api/trace/start", "POST", request)[0]) == 413 and time.monotonic() < end:
            time.sleep(0.2)
        return code

    def stop(self) -> None:
        self.cli.trainer.should_stop = True
        self.thread.join(60)


@pytest.fixture(scope="module")
def job(
    fit_arguments: Callable[..., Sequence[str]], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    endless = ["--trainer.max_steps=100000", "--trainer.val_check_interval=3", "--trainer.logger=false"]
    endless += ["--checkpoint.every_n_rollout_steps=100000", "--model.policy.cpu_threads=1"]
    endless += ["--trainer.enable_progress_bar=false", "--profiler.live=true", "--profiler.port=0"]
    running = Job(fit_arguments(tiny_llama, tmp_path_factory.mktemp("live") / "my_run", *endless))
    running.wait(lambda: running.page.state.status()["step"] >= 4)
    yield running
    running.stop()
    assert not running.thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        ask(running.port, "/api/status")


def test_status_and_every_channel(job: Job) -> None:
    code, status = ask(job.port, "/api/status")
    assert code == 200
    assert status["schema_version"] == 1
    assert status["run"] == "my_run"
    assert status["step"] >= 4
    assert status["total_optimizer_steps"] == 100000
    assert status["capacity_bytes"] > GIB
    for name in CHANNELS:
        code, reply = ask(job.port, f"/api/{name}?limit=3")
        assert code == 200
        assert reply["units"]
        assert len(reply["records"]) == (0 if name == "ooms" else 3)
    _, metrics = ask(job.port, "/api/metrics?since_step=3")
    assert min(record["step"] for record in metrics["records"]) == 3
    assert any("val/accuracy" in record for record in metrics["records"])
    assert all("rollout/reward_mean" in record for record in metrics["records"] if "val/accuracy" not in record)
    _, memory = ask(job.port, "/api/memory?limit=8")
    assert {"rollout", "train"} <= {record["phase"] for record in memory["records"]}
    assert all(record["kinds"]["adapters"] > 0 for record in memory["records"])
    _, sizes = ask(job.port, "/api/micro_batching?limit=1")
    assert sizes["records"][0]["micro_batch_size"] == 8
    _, few = ask(job.port, "/api/phases?limit=0")
    assert few["records"] == []
    assert few["left_out"] > 0


def test_only_this_machine_and_this_page_are_served(job: Job) -> None:
    own = {"Host": f"127.0.0.1:{job.port}"}
    assert ask(job.port, "/api/status", headers={"Host": f"localhost:{job.port}"})[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80"):
        assert ask(job.port, "/api/status", headers={"Host": host})[0] == 400  # DNS rebinding
        assert ask(job.port, "/api/trace/start", "POST", {}, headers={"Host": host})[0] == 400
    assert ask(job.port, "/api/trace/start", "POST", {}, {"Origin": "http://evil.example"})[0] == 403
    assert ask(job.port, "/api/trace/start", "POST", {}, {"Content-Type": "text/plain"})[0] == 415
    assert ask(job.port, "/api/trace/stop", "POST", ["x" * MAX_BODY_BYTES])[0] == 413
    assert ask(job.port, "/api/trace/start", headers=own)[0] == 405
    assert ask(job.port, "/api/trace")[1]["state"] in ("idle", "done")
    for path in ("/api/trace/file/../../etc/passwd", "/etc/passwd", "/api/trace/etc", "/docs"):
        assert ask(job.port, path)[0] == 404
    for query in ("limit=-1", "limit=x", "since_step=1e9", "since_step=%C2%B2"):
        assert ask(job.port, f"/api/metrics?{query}")[0] == 400
    outside = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in [*outside, "127.0.0.2"]:
        with pytest.raises(OSError, match="refused|timed out|unreachable"):
            socket.create_connection((address, job.port), timeout=2)


@pytest.mark.parametrize("phase", [None, "train"])
def test_a_trace_from_the_page_opens(job: Job, phase: str | None) -> None:
    assert job.start({"steps": 2, "phase": phase, "shapes": True}) == 202
    assert ask(job.port, "/api/trace/start", "POST", {})[0] == 409
    job.wait(lambda: ask(job.port, "/api/trace")[1]["state"] == "done")
    code, trace = ask(job.port, "/api/trace/file")
    assert code == 200
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert any("Backward" in str(name) for name in names)
    # the rollout's sampling is there only where the whole step was asked for
    assert ("aten::searchsorted" in names) == (phase is None)
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    assert job.page.trace is not None
    assert json.loads(job.page.trace.file.read_text()) == trace
    assert len(trace["traceEvents"]) > 50


def test_a_trace_can_be_stopped_and_wrong_requests_are_named(job: Job) -> None:
    assert ask(job.port, "/api/trace/stop", "POST", {})[0] == 409
    assert job.start({"steps": 50, "phase": "optimizer"}) == 202
    job.wait(lambda: ask(job.port, "/api/trace")[1]["state"] == "recording")
    assert ask(job.port, "/api/trace/stop", "POST", {})[0] == 202
    job.wait(lambda: ask(job.port, "/api/trace")[1]["state"] == "done")
    assert ask(job.port, "/api/trace/file")[0] == 200
    for body, word in (({"steps": 0}, "steps"), ({"phase": "x"}, "phase"), ({"file": "/etc/x"}, "file"), ([], "body"),
                       ({"steps": "2"}, "steps"), ({"steps": True}, "steps")):  # fmt: skip
        code, reply = ask(job.port, "/api/trace/start", "POST", body)
        assert code == 400
        assert word in reply["error"]


def test_the_page_in_a_browser(job: Job, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        pytest.skip("needs Chromium to look at the page")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
               "--virtual-time-budget=4000", "--dump-dom", f"http://127.0.0.1:{job.port}/"]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert '<h1 id="run">my_run</h1>' in dom
    assert re.search(r'<span id="now" class="now">rollout step \d+', dom)
    assert dom.count("<path") >= 6  # the curves
    assert dom.count("<rect") >= 10  # bars by kind and phase
    assert "0 out-of-memory errors" in dom
    assert "http" not in dom.replace("http://www.w3.org", "")  # nothing from outside


# ---- guards, with the real control and no run -----------------------------------------------------------------------


def control(tmp_path: Path, free: int = 8 * GIB, seconds: float = 1.0) -> TraceControl:
    return TraceControl(tmp_path / "trace.json", lambda: free, lambda phase: seconds)


@pytest.mark.parametrize(
    ("free", "safe", "accepted"),
    [
        (int(1.4 * GIB), True, False),
        (int(1.4 * GIB), False, True),
        (int(0.7 * GIB), False, False),
        (2 * GIB, True, True),
    ],
)
def test_short_memory_refuses_a_trace(tmp_path: Path, free: int, safe: bool, accepted: bool) -> None:
    trace = control(tmp_path, free)
    if accepted:
        assert trace.start(TraceRequest(safe=safe))["state"] == "requested"
        return
    with pytest.raises(Refused, match="GiB of memory are free") as refused:
        trace.start(TraceRequest(safe=safe))
    assert refused.value.status == 409
    assert trace.status()["state"] == "idle"


def test_a_large_trace_is_refused_by_its_estimate(tmp_path: Path) -> None:
    trace = control(tmp_path, seconds=2.0)
    plain = TraceRequest().estimate(2.0, trace.events_per_second)
    assert plain < SAFE_BYTES
    assert TraceRequest(shapes=True, stacks=True, memory=True).estimate(2.0, trace.events_per_second) == pytest.approx(
        2.8 * plain
    )
    assert TraceRequest(steps=3).estimate(2.0, trace.events_per_second) == 3 * plain
    with pytest.raises(Refused, match="MB") as refused:
        trace.start(TraceRequest(steps=2))
    assert refused.value.status == 413
    assert trace.start(TraceRequest(steps=2, safe=False))["estimated_bytes"] == 2 * plain


def test_running_out_of_memory_ends_a_trace_and_forbids_the_next(tmp_path: Path) -> None:
    trace = control(tmp_path)
    trace.start(TraceRequest())
    trace.step_begins()
    assert trace.status()["state"] == "recording"
    trace.out_of_memory()
    assert trace.status()["state"] == "failed"
    trace.step_ends()
    assert not trace.file.exists()
    with pytest.raises(Refused, match="memory ran out") as refused:
        trace.start(TraceRequest())
    assert refused.value.status == 409
    trace.last_oom = time.monotonic() - 1000
    trace.start(TraceRequest())
    trace.step_begins()
    torch.ones(8).sum()
    trace.step_ends()
    assert trace.status()["state"] == "done"
    assert json.loads(trace.file.read_text())["traceEvents"]


def test_histories_are_bounded_counted_and_without_nan() -> None:
    state = LiveState(capacity=3)
    for step in range(5):
        state.add("metrics", {"step": step, "loss": float("nan"), "inner": {"x": [float("inf"), 1.0]}})
    reply = state.read("metrics")
    assert [record["step"] for record in reply["records"]] == [2, 3, 4]
    assert reply["dropped"] == 2
    assert reply["records"][0]["loss"] is None
    assert reply["records"][0]["inner"] == {"x": [None, 1.0]}
    assert state.read("ooms")["records"] == []


def test_a_taken_port_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(LiveState(), control(tmp_path))
    first = LiveServer(app, 0)
    try:
        with pytest.raises(SystemFault, match=f"profiler.port={first.port}"):
            LiveServer(app, first.port)
    finally:
        first.close()
    with pytest.raises(UserError, match="profiler.port"):
        LiveServer(app, 70000)
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(SystemFault, match=r"grpo-lit\[live\]"):
        LivePage()
