"""Gradients summed over ranks once per pass, and proof that the ranks still hold the same weights.

Micro-batches accumulate on each rank alone, so ranks may run different numbers of them. Then one flat
all-reduce sums the gradients. Summed, not averaged: the token weights already divide by the totals over all
ranks. Without a process group every function acts as for one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class FlatGradients(NamedTuple):
    """Gradients of one dtype and device, one after the other."""

    params: list[nn.Parameter]
    flat: Tensor
    """(sum of sizes,) in at least float32."""

    def all_reduce(self) -> None:
        """Sum over the ranks and put the result back into the gradients, without new memory."""
        dist.all_reduce(self.flat)
        for param, piece in zip(self.params, self.flat.split([p.numel() for p in self.params]), strict=True):
            assert param.grad is not None
            param.grad.copy_(piece.view_as(param))


def flatten_gradients(params: Iterable[nn.Parameter]) -> list[FlatGradients]:
    """One flat buffer of gradients per dtype and device; float32 for 16-bit gradients.

    A parameter without a gradient gets one of zeros: a rank that ran no micro-batch takes part like the others.

    Args:
        params: trainable parameters, the same ones in the same order on every rank.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        by_kind.setdefault((param.dtype, param.device), []).append(param)
    groups = []
    for (dtype, device), members in by_kind.items():
        wide = torch.promote_types(dtype, torch.float32)
        flat = torch.zeros(sum(param.numel() for param in members), dtype=wide, device=device)
        for param, piece in zip(members, flat.split([param.numel() for param in members]), strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            else:
                piece.copy_(param.grad.reshape(-1))
        groups.append(FlatGradients(members, flat))
    return groups


def flat_all_reduce(params: Iterable[nn.Parameter]) -> None:
    """Sums the gradients of all parameters over the ranks, in place, in one all-reduce per dtype.

    Args:
        params: as in `flatten_gradients`.
    """
    if world_size() > 1:
        for group in flatten_gradients(params):
            group.all_reduce()


def parameter_hash(params: Iterable[Tensor]) -> str:
    """Digest of the exact bits of all parameters, in order: 16 hexadecimal digits.

    One differing bit, or a swap of two parameters, changes it. -0.0 and 0.0 differ. On a GPU the bits are hashed
    where they are (`bit_hash`) and only the result travels; on the CPU they go through SHA-256. Shapes, dtypes and
    that result go through SHA-256 in both cases.

    Args:
        params: tensors of any dtype and device; shapes and dtypes are part of the digest.
    """
    digest = hashlib.sha256()
    on_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        values = param.detach()
        digest.update(f"{values.dtype}{tuple(values.shape)}".encode())
        if values.is_cuda:
            on_device.setdefault(values.device, []).append(values)
        else:
            digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for tensors in on_device.values():
        digest.update(bit_hash(tensors).to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


_CHUNK = 2**21  # 32-bit words hashed at a time: the temporaries take 16 MiB each


def bit_hash(tensors: Sequence[Tensor]) -> int:
    """A 64-bit hash of the bits of tensors on one device, computed there, with one number read back.

    The sum, modulo 2^64, of mix(word + (position + 1) x golden) over the 32-bit words, with the finalizer of
    splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) as mix. The mix is a
    bijection that turns one changed bit into half of the 64, so two sets of weights collide with a probability
    of about 2^-64, as long as nobody looks for a collision on purpose.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    position, pieces, size = 0, [], 0
    for tensor in tensors:
        for piece in _words(tensor).split(_CHUNK):
            pieces.append(piece)
            size += len(piece)
            if size >= _CHUNK:
                total += _mixed_sum(torch.cat(pieces), position)
                position, pieces, size = position + size, [], 0
    if pieces:
        total += _mixed_sum(torch.cat(pieces), position)
    return int(total)


def _words(tensor: Tensor) -> Tensor:
    """The bits as int32, zeros behind the last where the size is no multiple of 4 bytes."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(octets) % 4:
        octets = torch.nn.functional.pad(octets, (0, 4 - len(octets) % 4))
    return octets.view(torch.int32)


def _mixed_sum(words: Tensor, position: int) -> Tensor:
    # int64 wraps around; the constants are written as the signed numbers of the same bits
    index = torch.arange(position + 1, position + 1 + len(words), device=words.device)
    mixed = words + index * -7046029254386353131  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        # the shift of splitmix64 brings in zeros, int64's brings in signs
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return mixed.sum()


def check_parameter_hash(
    params: Sequence[Tensor] | Iterable[Tensor], *, step: int, device: torch.device | str = "cpu"
) -> str:
    """`check_digest` of the `parameter_hash` of trainable parameters, in the same order on every rank."""
    return check_digest(parameter_hash(params), step=step, device=device)


def check_digest(digest: str, *, step: int, device: torch.device | str = "cpu") -> str:
    """Stops the run, on all ranks at once, if any of them holds other weights.

    Args:
        digest: `parameter_hash` of this rank's trainable parameters.
        step: for the message.
        device: where the exchange runs; the GPU with NCCL.

    Returns:
        The digest, equal on all ranks.

    Raises:
        SystemFault: on every rank, naming the ranks by digest.
    """
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
