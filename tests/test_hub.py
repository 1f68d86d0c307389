"""What is said of the model hub, here a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_lit.hub import announce_download

FILES = {"model-1.safetensors": 2_000_000_000, "model-2.safetensors": 500_000_000, "pytorch_model.bin": 9, "a.json": 7}


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path.startswith("/api/models/org/name")
        siblings = [{"rfilename": name, "size": size} for name, size in FILES.items()]
        body = json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": siblings} if known else {}).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A hub that knows org/name; yields the cache's folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_a_download_is_announced_with_what_is_missing(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announce_download("org/name")
    assert capsys.readouterr().err == f"downloading org/name, 2.5 GB, to {hub}\n"
    snapshot = hub / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / "model-1.safetensors").touch()
    announce_download("org/name")
    assert capsys.readouterr().err == f"downloading org/name, 0.5 GB, to {hub}\n"
    (snapshot / "model-2.safetensors").touch()
    announce_download("org/name")
    assert capsys.readouterr().err == ""


def test_nothing_is_announced_without_a_hub_or_on_other_ranks(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_download("org/other")
    monkeypatch.setenv("LOCAL_RANK", "1")
    announce_download("org/name")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    announce_download("org/name")
    assert capsys.readouterr().err == ""
