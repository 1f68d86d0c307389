"""The client side of server mode, against a small HTTP server that answers as vLLM's endpoints do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit.cli import main
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rollout import SamplingConfig, VLLMConfig
from grpo_lit.rollout.vllm_backend import Adapter, Sampled
from grpo_lit.rollout.vllm_server import ServerBackend, serve_command

ADAPTER = Adapter("live-3", 3, Path("/dev/shm/live-3"))
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_completion_length=5)


class FakeVLLM:
    """Completions are [seed, prompt length, 2]; everything that arrives is kept."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.adapters: dict[str, str] = {}
        self.fail_at_seed: int | None = None
        self.lora_endpoints = True
        self.with_token_ids = True
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                models = [{"id": "base", "parent": None, "max_model_len": 32}]
                models += [{"id": name, "parent": "base"} for name in fake.adapters]
                self.reply(200, {"data": models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*fake.answer(self.path, body))

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self.lock:
            self.bodies.append((path, body))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if path.endswith("_lora_adapter"):
                return self.adapter_call(path, body)
            return self.complete(body)
        finally:
            with self.lock:
                self.in_flight -= 1

    def adapter_call(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.lora_endpoints:
            return 404, {"detail": "Not Found"}
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": "the adapter cannot be found"}}
        return 200, "Success"

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"no model {body['model']}"}}
        if "prompt_logprobs" in body:
            scores = [None] + [{str(token): {"logprob": -token / 10}} for token in body["prompt"][1:]]
            return 200, {"choices": [{"prompt_logprobs": scores}]}
        time.sleep(0.02 * (4 - body["seed"] % 5))  # later rows come back earlier
        if body["seed"] == self.fail_at_seed:
            return 500, {"error": {"message": "engine dead"}}
        ids = [body["seed"], len(body["prompt"]), 2]
        choice: dict[str, Any] = {"logprobs": {"token_logprobs": [-0.5, -1.5, -0.25]}}
        return 200, {"choices": [choice | ({"token_ids": ids} if self.with_token_ids else {})]}


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    made = FakeVLLM()
    yield made
    made.server.shutdown()
    made.server.server_close()


def sample(backend: ServerBackend, num_rows: int = 5, **options: Any) -> dict[int, Sampled]:
    rows: dict[int, Sampled] = {}
    prompts = [[1] * (row % 20 + 1) for row in range(num_rows)]
    arguments = {"adapter": ADAPTER, "rows_in_flight": None} | options
    backend.sample(prompts, list(range(num_rows)), SAMPLING, [2, 7], on_row=rows.__setitem__, **arguments)
    return rows


def test_rows_seeds_and_settings_reach_the_server(fake: FakeVLLM) -> None:
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url + "/"))
    backend.load(ADAPTER)
    assert fake.adapters == {"live-3": "/dev/shm/live-3"}
    rows = sample(backend)
    assert rows == {row: Sampled([row, row + 1, 2], [-0.5, -1.5, -0.25]) for row in range(5)}
    path, body = next((path, body) for path, body in fake.bodies if body.get("seed") == 3)
    assert path == "/v1/completions"
    assert body["model"] == "live-3"
    assert body["prompt"] == [1, 1, 1, 1]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 5)
    assert body["stop_token_ids"] == [2, 7]
    assert body["return_token_ids"] is True
    assert backend.score([[5, 6, 7]], ADAPTER) == [[-0.6, -0.7]]
    assert sample(backend, adapter=None)[0].ids == [0, 1, 2]
    assert fake.bodies[-1][1]["model"] == "base"
    backend.unload(ADAPTER)
    assert fake.adapters == {}


def test_no_more_rows_in_flight_than_asked(fake: FakeVLLM) -> None:
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    assert len(sample(backend, num_rows=12, adapter=None, rows_in_flight=2)) == 12
    assert fake.most_in_flight == 2
    sample(backend, num_rows=12, adapter=None)
    assert fake.most_in_flight > 2


def test_rows_are_cut_at_their_answer(fake: FakeVLLM) -> None:
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    rows = sample(backend, adapter=None, row_end=lambda row, ids, checked: 1 if row == 2 else None)
    assert rows[2] == Sampled([2], [-0.5], answered=True)
    assert rows[1].answered is False


def test_an_error_stops_the_rollout_and_starts_no_new_rows(fake: FakeVLLM) -> None:
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    fake.fail_at_seed = 1
    with pytest.raises(SystemFault, match="500 engine dead"):
        sample(backend, num_rows=50, adapter=None, rows_in_flight=2)
    time.sleep(0.3)
    assert len(fake.bodies) < 10


def test_nobody_there() -> None:
    with pytest.raises(SystemFault, match=r"server_url='http://127.0.0.1:9'"):
        ServerBackend(VLLMConfig(mode="server", server_url="http://127.0.0.1:9"))


def test_a_server_without_adapter_endpoints(fake: FakeVLLM) -> None:
    fake.lora_endpoints = False
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    with pytest.raises(SystemFault, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        backend.load(ADAPTER)


def test_a_server_that_returns_text_only(fake: FakeVLLM) -> None:
    fake.with_token_ids = False
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    with pytest.raises(SystemFault, match="token ids"):
        sample(backend, adapter=None)


def test_longer_than_the_server_allows(fake: FakeVLLM) -> None:
    backend = ServerBackend(VLLMConfig(mode="server", server_url=fake.url))
    with pytest.raises(UserError, match="max-model-len"):
        backend.sample([[1] * 28], [0], SAMPLING, [2], None, None, {}.__setitem__)
    assert fake.bodies == []


def test_serve_command_has_what_training_needs() -> None:
    command = serve_command("/models/base", torch.bfloat16, 12)
    assert command.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve /models/base ")
    for part in ("--max-lora-rank 16", "--logprobs-mode processed_logprobs", "--dtype bfloat16", "--enable-lora"):
        assert part in command


def test_a_server_that_is_down_ends_a_fit_before_the_earlier_run_is_moved(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Callable[..., Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    (root / "checkpoints").mkdir(parents=True)
    earlier = root / "metrics.jsonl"
    earlier.write_text('{"step": 1}\n')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    server = ["--model.rollout.engine=vllm", "--model.rollout.vllm.mode=server"]
    assert main([*fit_arguments(tiny_llama, root), *server, f"--model.rollout.vllm.server_url={url}"]) == 1
    assert f"model.rollout.vllm.server_url='{url}': no vLLM server answers" in capsys.readouterr().err
    assert earlier.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
