"""Pictures of pages for the documentation, taken by a headless Chromium or Chrome.

python scripts/screenshots.py report runs/evaluation/report.html docs/figures/evaluate_report.png
python scripts/screenshots.py tensorboard runs/quickstart docs/figures/tensorboard.png
python scripts/screenshots.py live docs/figures/live_page.png       # starts a quick start of its own, and waits
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = {"report": (1160, 1600), "tensorboard": (1300, 1060), "live": (1180, 1620)}
PATIENCE_S = 180.0
"""Longest wait for a server, or for the steps that a page is to show."""


def picture(url: str, target: Path, size: tuple[int, int]) -> None:
    """Write what a browser shows at `url` after 15 s of its own time to `target`, a PNG."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"one of {', '.join(BROWSERS)} must be on the PATH")
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        command += ["--virtual-time-budget=15000", f"--screenshot={target.resolve()}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    print(f"{target}: {target.stat().st_size} bytes")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], url: str) -> Iterator[None]:
    """A server that answers at `url`, ended with the block."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(url, b"", server)
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(url: str, content: bytes, server: subprocess.Popen[bytes]) -> None:
    """Return once `url` answers with something that has `content` in it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if content in answer.read():
                return
        time.sleep(0.5)
    raise SystemExit(f"{url} has not answered as it should")


def main(arguments: Sequence[str]) -> None:
    """Take the picture that the command line asks for."""
    match list(arguments):
        case ["report", source, target]:
            picture(Path(source).resolve().as_uri(), Path(target), SIZES["report"])
        case ["tensorboard", run, target]:
            port = free_port()
            url = f"http://127.0.0.1:{port}/"
            logs = Path(run) / "tensorboard"
            with serving([sys.executable, "-m", "tensorboard.main", f"--logdir={logs}", f"--port={port}"], url):
                picture(f"{url}#scalars", Path(target), SIZES["tensorboard"])
        case ["live", target]:
            port = free_port()
            url = f"http://127.0.0.1:{port}/"
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "grpo_lit", "fit", "--config=quickstart", "--profiler.live=true"]
                command += [f"--profiler.port={port}", f"--trainer.default_root_dir={folder}/run"]
                with serving(command, url):
                    # the twentieth step: curves to look at, and the run goes on
                    time_out = time.monotonic() + PATIENCE_S
                    while time.monotonic() < time_out and not _has_steps(Path(folder) / "run" / "metrics.jsonl", 20):
                        time.sleep(0.2)
                    picture(url, Path(target), SIZES["live"])
        case _:
            raise SystemExit(__doc__)


def _has_steps(metrics: Path, steps: int) -> bool:
    return metrics.is_file() and metrics.read_bytes().count(b"\n") >= steps


if __name__ == "__main__":
    main(sys.argv[1:])
