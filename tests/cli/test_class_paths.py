"""Class paths are looked up in the folder where the command is started, whose console script's path lacks it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_lit.cli.parser import GRPOCLI


def test_a_callback_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "callback_of_this_folder.py").write_text("from lightning.pytorch import Callback as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    cli = GRPOCLI(["--config", "quickstart", "--trainer.callbacks", "callback_of_this_folder.Mine"], "fit")
    assert "callback_of_this_folder" in sys.modules
    assert cli.trainer.default_root_dir == "runs/quickstart"
