"""Segments that grow: switched on where nobody has set the allocator up, and off where asked."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.memory.allocator import expand_segments


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings that reached torch's allocator, on a build that has CUDA."""
    settings: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return settings


def test_on_unless_the_user_has_set_the_allocator_up(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert expand_segments()
    assert made == ["expandable_segments:True"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64")
            assert not expand_segments()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not expand_segments()
    assert len(made) == 1


@pytest.mark.gpu
def test_segments_grow_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    torch.cuda.empty_cache()
    assert expand_segments()
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    assert any(s["is_expandable"] and s["total_size"] >= held.nbytes for s in segments)
