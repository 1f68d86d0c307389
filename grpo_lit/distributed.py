"""Gradients summed over ranks once per pass, and proof that the ranks still hold the same weights.

Micro-batches accumulate on each rank alone, so ranks may run different numbers of them. Then one flat
all-reduce sums the gradients. Summed, not averaged: the token weights already divide by the totals over all
ranks. Without a process group every function acts as for one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_lit.errors import SystemFault


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(*values: float | Tensor, device: torch.device | str = "cpu") -> list[float]:
    """Each value summed over the ranks, in one all-reduce of float64.

    Args:
        values: numbers, such as the counts of rows and tokens that `token_weights` divides by.
        device: where the all-reduce runs; the GPU with NCCL.
    """
    totals = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    if world_size() > 1:
        dist.all_reduce(totals)
    return totals.tolist()


def gather_rows(tensor: Tensor) -> tuple[Tensor, slice]:
    """Rows of all ranks in rank order, and where this rank's own lie among them.

    Args:
        tensor: (n, ...) with any n on each rank, other dimensions and dtype the same on all.

    Returns:
        (sum of n, ...) and a slice.
    """
    ranks = world_size()
    if ranks == 1:
        return tensor, slice(0, len(tensor))
    sizes = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(tensor)], dtype=torch.int64, device=tensor.device))
    lengths = [int(size) for size in sizes]
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded)
    start = sum(lengths[: dist.get_rank()])
    rows = torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])
    return rows, slice(start, start + len(tensor))


def flat_all_reduce(params: Iterable[nn.Parameter], *, average: bool = False) -> None:
    """Sums the gradients of all parameters over the ranks, in place, in one all-reduce per dtype.

    A parameter without a gradient counts as 0, so that a rank that ran no micro-batch takes part like the
    others: afterwards every parameter has a gradient. The buffer is float32 for 16-bit gradients.

    Args:
        params: trainable parameters, the same ones in the same order on every rank.
        average: divide by the number of ranks, for losses that are means per rank.
    """
    ranks = world_size()
    if ranks == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        by_kind.setdefault((param.dtype, param.device), []).append(param)
    for (dtype, device), group in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        flat = torch.zeros(sum(param.numel() for param in group), dtype=wide, device=device)
        pieces = flat.split([param.numel() for param in group])
        for param, piece in zip(group, pieces, strict=True):
            if param.grad is not None:
                piece.copy_(param.grad.reshape(-1))
        dist.all_reduce(flat)
        if average:
            flat /= ranks
        for param, piece in zip(group, pieces, strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(piece.view_as(param))


def parameter_hash(params: Iterable[Tensor]) -> str:
    """Digest of the exact bits of all parameters, in order: 16 hexadecimal digits of SHA-256.

    One differing bit, or a swap of two parameters, changes it. -0.0 and 0.0 differ.

    Args:
        params: tensors of any dtype and device; shapes and dtypes are part of the digest.
    """
    digest = hashlib.sha256()
    for param in params:
        values = param.detach().contiguous().cpu()
        digest.update(f"{values.dtype}{tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_parameter_hash(
    params: Sequence[Tensor] | Iterable[Tensor], *, step: int, device: torch.device | str = "cpu"
) -> str:
    """Stops the run, on all ranks at once, if any of them holds other weights.

    Args:
        params: trainable parameters, in the same order on every rank.
        step: for the message.
        device: where the exchange runs; the GPU with NCCL.

    Returns:
        The digest, equal on all ranks.

    Raises:
        SystemFault: on every rank, naming the ranks by digest.
    """
    digest = parameter_hash(params)
    ranks = world_size()
    if ranks == 1:
        return digest
    # 64 bits travel as one int64; all_gather_object would pickle
    number = int.from_bytes(bytes.fromhex(digest), "big", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    by_digest: dict[str, list[int]] = {}
    for rank, value in enumerate(gathered):
        key = int(value).to_bytes(8, "big", signed=True).hex()
        by_digest.setdefault(key, []).append(rank)
    if len(by_digest) > 1:
        listed = ", ".join(f"ranks {members}: {key}" for key, members in sorted(by_digest.items()))
        raise SystemFault(
            f"step {step}: the ranks hold different trainable weights ({listed}). A rank missed or changed "
            "an update; resume from the last checkpoint."
        )
    return digest
