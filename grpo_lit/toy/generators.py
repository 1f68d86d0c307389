"""Random numbers as a C++ program draws them from std::mt19937, so that its figures can be repeated."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class MersenneTwister:
    """std::mt19937 with std::generate_canonical<double, 53> on top, as libstdc++ implements them.

    Two 32-bit words make a uniform number: (low + high x 2^32) / 2^64.

    Args:
        seed: the 32-bit seed, scattered by the generator's classic initialisation.
    """

    def __init__(self, seed: int) -> None:
        # RandomState keeps the classic initialisation; numpy's newer generators seed otherwise
        self._state = np.random.RandomState(seed)

    def uniforms(self, count: int) -> np.ndarray:
        """The next `count` numbers in [0, 1), (count,) float64."""
        # the full range takes one word of the generator each, unchanged
        words = self._state.randint(0, 2**32, size=(count, 2), dtype=np.uint32).astype(np.float64)
        uniforms = (words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64
        below_one: NDArray[np.float64] = np.minimum(uniforms, np.nextafter(1.0, 0.0))
        return below_one


class TorchUniforms:
    """Uniform numbers from torch's own generator, with the same interface."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniforms(self, count: int) -> np.ndarray:
        """The next `count` numbers in [0, 1), (count,) float64."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64).numpy()
