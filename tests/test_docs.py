"""The documentation names what there is: metrics of a real run, pages of the site, the command behind each figure."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def documented(key: str, text: str) -> bool:
    """Whether a key stands in the glossary: whole, as prefix with <...>, or as a suffix listed behind its stem."""
    group, _, name = key.partition("/")
    for pattern in set(re.findall(r"`([a-z0-9_/<>*]+)`", text)):
        expression = re.sub(r"<[a-z_]+>", "[a-z0-9_]+", pattern).replace("*", ".*")
        candidates = [expression, f"{group}/{expression}"]
        if pattern.startswith("_"):
            candidates = [f"{group}/.*{expression}"]
        if any(re.fullmatch(candidate, key) for candidate in candidates):
            return True
    return False


EXTRA_CALLBACKS = ("AdaptiveMicroBatch", "AutoCheckpointing", "EntropyMask", "TargetProbability", "VRAMProfiler")


def test_every_metric_of_a_run_is_in_the_glossary(tmp_path: Path, grpo_lit_command: Callable[..., object]) -> None:
    root = tmp_path / "run"
    grpo_lit_command(
        "fit",
        "--config=quickstart",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=1",
        "--model.loss.beta=0.01",
        "--data.prompts_per_step=4",
        "--data.val_prompts=4",
        "--model.rollout.refill_rounds=1",
        "--model.policy.gradient_checkpointing=auto",
        *(f"--trainer.callbacks+=grpo_lit.callbacks.{name}" for name in EXTRA_CALLBACKS),
    )
    keys = {key for line in (root / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
    assert {"train/loss", "train/ref_kl", "val/accuracy", "perf/rollout_s", "rollout/refill_rounds"} <= keys
    assert {"train/entropy_mask_kept", "micro_batch/tokens", "val/target_probability"} <= keys
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    missing = sorted(key for key in keys if not documented(key, text))
    assert not missing


def test_every_page_is_in_the_table_of_contents() -> None:
    toctree = re.search(r"```\{toctree\}\n:maxdepth: 1\n\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    assert toctree is not None
    assert sorted(toctree[1].split()) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


def test_every_option_is_on_its_page() -> None:
    """Of `grpo-lit fit`, of every callback and of `evaluate`, with a text each."""
    script = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))
    options = [option for section in script["sections"]().values() for option in section]
    names = {name for name, _, _ in options}
    assert {"model.policy.attn_implementation", "data.sent_stages", "LivePage.history", "reward_timeout_s"} <= names
    assert [name for name, _, text in options if not text] == []
    assert (DOCS / "options.md").read_text(encoding="utf-8") == script["page"](), "python scripts/options_page.py"


FIGURES = {
    name: command
    for name, command in re.findall(
        r"^\| `(\S+)` \| (?:`([^`]+)`|drawn by hand) \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M
    )
    if name.endswith((".png", ".svg"))
}
DRAWN_FROM_A_FILE = [name for name, command in FIGURES.items() if "docs/results" in command and "--plot" not in command]


def test_every_figure_is_shown_and_its_command_named() -> None:
    assert sorted(FIGURES) == sorted(file.name for file in (DOCS / "figures").iterdir())
    texts = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *DOCS.glob("*.md")))
    shown = set(re.findall(r"!\[[^\]]+\]\((?:docs/)?figures/([^)]+)\)", texts))
    assert shown == set(FIGURES)
    assert [name for name, command in FIGURES.items() if not command] == ["loop.svg"]
    for name, command in FIGURES.items():
        if command:
            words = shlex.split(command)
            assert words[-1] == f"docs/figures/{name}"
            assert words[:2] == ["grpo-lit", "bench"] or (ROOT / words[1]).is_file()


@pytest.mark.parametrize("name", DRAWN_FROM_A_FILE)
def test_a_figure_is_what_its_command_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixel by pixel, where the same matplotlib draws it."""
    import matplotlib

    assert len(DRAWN_FROM_A_FILE) == 3
    _, script, source, _ = shlex.split(FIGURES[name])
    target = tmp_path / name
    monkeypatch.setattr(sys, "argv", [script, str(ROOT / source), str(target)])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    with Image.open(target) as drawn, Image.open(DOCS / "figures" / name) as committed:
        assert drawn.size == committed.size
        if f"version{matplotlib.__version__}," in committed.info.get("Software", ""):
            difference = np.asarray(drawn.convert("RGB")).astype(int) - np.asarray(committed.convert("RGB"))
            assert np.abs(difference).max() <= 2


def test_a_page_is_pictured_without_its_empty_end(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "screenshots.py"))
    if not any(map(shutil.which, script["BROWSERS"])):
        pytest.skip("needs Chromium or Chrome")
    page = tmp_path / "page.html"
    page.write_text("<body style='margin: 0'><div style='background: #00f; width: 50%; height: 100px'></div>")
    script["picture"](page.as_uri(), tmp_path / "page.png", (400, 300))
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (400, 124)
        pixels = np.asarray(picture.convert("RGB"))
    assert (pixels[:100, :200] == (0, 0, 255)).all()
    assert (pixels[101:] == 255).all()
    assert (pixels[:, 201:] == 255).all()
