"""Pictures of pages for the documentation, taken by a headless Chromium or Chrome.

python scripts/screenshots.py tensorboard runs/quickstart docs/figures/tensorboard.png
python scripts/screenshots.py report runs/evaluation/report.html docs/figures/evaluate_report.png
python scripts/screenshots.py live docs/figures/live_page.png       # starts a quick start of its own, and waits

The first two show what `grpo-lit fit --config quickstart` and, after it, `grpo-lit evaluate --config evaluate` left.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Width and height in pixels; where a page ends before, so does its picture.
SIZES = {"report": (1160, 1735), "tensorboard": (1300, 850), "live": (1180, 1700)}
# What TensorBoard shows, and how: it takes some of it from the URL, the rest from what a browser has stored.
TAGS = "rollout/reward_mean$|val/acc|train/entropy$|grad_norm$|rollout/completion_length$|perf/tokens"
SETTINGS = {
    "scalarSmoothing": 0,
    "ignoreOutliers": False,
    "stepSelectorEnabled": False,
    "timeSeriesSettingsPaneOpened": False,
    "sideBarWidthInPercent": 14,
}
PATIENCE_S = 180.0
"""Longest wait for a server, or for the steps that a page is to show."""


def browse(url: str, target: Path, size: tuple[int, int], profile: str) -> None:
    """Write what a browser shows at `url` after a minute of its own time to `target`, a PNG."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"one of {', '.join(BROWSERS)} must be on the PATH")
    # Without WebGL TensorBoard draws its curves as SVG, at once; else by a worker that has no time to finish.
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
    command += ["--virtual-time-budget=60000", f"--screenshot={target.resolve()}", url]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)


def picture(url: str, target: Path, size: tuple[int, int], profile: str | None = None) -> None:
    """Write what a browser shows at `url` to `target`, without the empty end."""
    with tempfile.TemporaryDirectory() as fresh:
        browse(url, target, size, profile or fresh)
    with Image.open(target) as shot:
        pixels = np.asarray(shot.convert("RGB"))
        written = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))
        end = min(size[1], int(written[-1]) + 25) if written.size else size[1]
        # 256 colours are enough for a page, and a third of the bytes.
        shot.convert("RGB").crop((0, 0, size[0], end)).quantize(256, dither=Image.Dither.NONE).save(
            target, optimize=True
        )
    print(f"{target}: {size[0]} x {end}, {target.stat().st_size} bytes")


def report(source: str, target: str) -> None:
    """The page of `grpo-lit evaluate`."""
    picture(Path(source).resolve().as_uri(), Path(target), SIZES["report"])


def tensorboard(run: str, target: str) -> None:
    """TensorBoard's scalars of a run: unsmoothed, and no curve cut."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with tempfile.TemporaryDirectory() as folder:
        # A page at TensorBoard's address, before it is there, stores its settings in the browser.
        page = Path(folder) / "index.html"
        page.write_text(f"<script>localStorage._tb_global_settings = {json.dumps(json.dumps(SETTINGS))}</script>")
        with serving([sys.executable, "-m", "http.server", f"--directory={folder}", str(port)], url):
            browse(url, Path(folder) / "stored.png", (400, 300), f"{folder}/profile")
        with serving([sys.executable, "-m", "tensorboard.main", f"--logdir={run}", f"--port={port}"], url):
            shown = f"{url}?smoothing=0&tagFilter={quote(TAGS)}#timeseries"
            picture(shown, Path(target), SIZES["tensorboard"], f"{folder}/profile")


def live(target: str) -> None:
    """The live page of a quick start in its course, with a trace recorded from the page's own button."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "quickstart" / "metrics.jsonl"
        command = [sys.executable, "-m", "grpo_lit", "fit", "--config=quickstart", "--profiler.live=true"]
        command += [f"--profiler.port={port}", f"--trainer.default_root_dir={metrics.parent}"]
        with serving(command, url):
            until(lambda: _has_steps(metrics, 12), "12 steps")
            start = urllib.request.Request(
                f"{url}api/trace/start", b'{"steps": 2}', {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(start, timeout=5).close()
            until(lambda: b'"done"' in _read(f"{url}api/trace"), "a trace")
            until(lambda: _has_steps(metrics, 25), "25 steps")
            picture(url, Path(target), SIZES["live"])


@contextlib.contextmanager
def serving(command: Sequence[str], url: str) -> Iterator[None]:
    """A server that answers at `url`, ended with the block."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: bool(_read(url)), f"an answer from {url}")
        yield
    finally:
        server.terminate()
        server.wait(timeout=30)


def until(ready: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if ready():
                return
        time.sleep(0.2)
    raise SystemExit(f"no {what} within {PATIENCE_S:.0f} s")


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def _has_steps(metrics: Path, steps: int) -> bool:
    return metrics.is_file() and metrics.read_bytes().count(b"\n") > steps


PAGES = {"report": report, "tensorboard": tensorboard, "live": live}

if __name__ == "__main__":
    try:
        PAGES[sys.argv[1]](*sys.argv[2:])
    except (IndexError, KeyError, TypeError):
        raise SystemExit(__doc__) from None
