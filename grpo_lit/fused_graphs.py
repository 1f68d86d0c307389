"""All fused layers as two CUDA graphs, forward and backward: on a fast GPU launching takes longer than computing.

A micro-batch of 28 layers is some 3,300 kernels. Recorded once (``torch.cuda.graph``) they are launched by one call
each for the forward and the backward, at addresses that never change: inputs are copied into buffers of their own, and
the input of every layer, which the backward recomputes from, stays in a buffer of its own.

Shapes are part of a recording, so tokens are padded to the next of eight sizes an octave, as a sequence of their own
that nobody reads, and the number of sequences to a multiple of four, with empty ones; also before a shape is recorded,
so that recorded or not a pass gives the same bits.

Recordings last until `release`, which the end of a step's passes calls: rollouts have their memory in between. A shape
is recorded when it comes the second time since then, or the first time where the passes before used it three times or
more; recording takes as long as one pass that isn't. All recordings share one pool of memory. Where one fails, for want
of memory above all, the layers run unrecorded from then on.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_lit.fused_layers import Call, layer_backward, layer_forward
from grpo_lit.kernels.packed_attention import Sequences, flashes
from grpo_lit.memory.plan import RECORDING_ROOM, padded_tokens
from grpo_lit.oom import drop_frames, memory_limit

if TYPE_CHECKING:
    from grpo_lit.fused_decoder import FusedDecoder

_log = logging.getLogger("grpo_lit.layers")

_PAYS = 3  # passes over a shape that make up for its recording


class Recording(NamedTuple):
    """The two graphs of one shape.

    Attributes:
        forward: reads the first of ``inputs``, writes the others.
        backward: reads ``inputs`` and ``dy``, writes the gradients.
        inputs: input of each layer (tokens, H), and the output of the last.
        cos: (tokens, D).
        sin: (tokens, D).
        starts: (sequences + 1,) int32.
        dy: (tokens, H), gradient of the output.
        grads: of each adapter's A and B, in ``flat``.
        flat: all of them, end to end.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    cos: Tensor
    sin: Tensor
    starts: Tensor
    dy: Tensor
    grads: list[Tensor]
    flat: Tensor


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a CUDA device, what its allocator keeps for later included."""
    return memory_limit(device) - torch.cuda.memory_allocated(device)


class LayerGraphs:
    """Recordings of a decoder's layers, by shape.

    Args:
        decoder: whose layers; all of them checkpointed, nothing offloaded.
        min_free: bytes that have to be free on the device for a recording; below it, layers run as they are.

    Attributes:
        serial: counts forward replays: a backward must know whether the layer inputs are still its own.
        pool_bytes: held by the recordings for what passes compute, beside `buffer_bytes`.
        recorded: whether there were recordings when they were last released.
    """

    def __init__(self, decoder: FusedDecoder, min_free: int = RECORDING_ROOM) -> None:
        self._decoder, self._min_free = decoder, min_free
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._seen: Counter[tuple[int, int]] = Counter()
        self._earlier: Counter[tuple[int, int]] = Counter()
        self._loaded: set[tuple[int, int]] = set()
        self._addresses: list[int] = []
        self._buffers: Tensor | None = None
        self._pool: Any = None
        self._grads: list[Tensor] = []
        self._flat = torch.empty(0)
        self._failed = False
        self.serial = self.pool_bytes = 0
        self.recorded = False

    @property
    def buffer_bytes(self) -> int:
        """Held by the inputs of all layers and the gradients, as long as there are recordings."""
        return sum(t.numel() * t.element_size() for t in (self._buffers, self._flat) if t is not None)

    def release(self) -> None:
        """Give back all recordings and their memory."""
        held = bool(self._recordings)
        self._recordings.clear()
        if self._seen:
            self._earlier, self._seen, self.recorded = self._seen, Counter(), held
        self._buffers, self._pool, self._grads, self._flat = None, None, [], torch.empty(0)
        self.pool_bytes = 0
        self.serial += 1
        if held:
            torch._C._cuda_clearCublasWorkspaces()  # of recordings, in their pool
            torch.cuda.empty_cache()  # nobody else can use what was in that pool

    def applies(self, x: Tensor) -> bool:
        """Whether a pass over these embeddings (tokens, H) may be recorded, now or later.

        Attention has to read where sequences start from the device, and the backward to start from each layer's input.
        """
        checkpointing = self._decoder.checkpointing
        size = self._decoder.layers[0].size
        return (
            not self._failed
            and flashes(x.new_empty(0, 1, size))
            and checkpointing is not None
            and checkpointing.count == len(self._decoder.layers)
            and checkpointing.offload is None
        )

    @staticmethod
    def padded(x: Tensor, positions: Tensor, where: Sequences) -> tuple[Tensor, Tensor, Sequences]:
        """The same call in a size that recordings have.

        Args:
            x: (tokens, H) embeddings.
            positions: (tokens,) long.
            where: the sequences.
        """
        rest = padded_tokens(len(x)) - len(x)
        lengths = [*where.lengths, rest]
        lengths += [0] * (-len(lengths) % 4)
        pad = torch.nn.functional.pad
        return pad(x, (0, 0, 0, rest)), pad(positions, (0, rest)), Sequences.of(lengths, x.device)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, where: Sequences) -> Tensor | None:
        """Output of the last layer, or None where no recording fits this call.

        Args:
            x: (tokens, H) embeddings, padded, of a pass to which recordings apply.
            cos: (tokens, D).
            sin: (tokens, D).
            where: the sequences.
        """
        parameters = self._parameters()
        if parameters is None or torch.cuda.is_current_stream_capturing():
            return None
        recording = self._find((len(x), len(where.lengths)), x, cos, parameters)
        if recording is None:
            return None
        if torch.is_grad_enabled():
            return _Graphed.apply(x, self, recording, cos, sin, where, *parameters)  # type: ignore[no-any-return]
        return self.replay(recording, x, cos, sin, where)

    def replay(self, recording: Recording, x: Tensor, cos: Tensor, sin: Tensor, where: Sequences) -> Tensor:
        """Output of the last layer, a copy of its own."""
        self.serial += 1
        buffers = (recording.inputs[0], recording.cos, recording.sin, recording.starts)
        for buffer, value in zip(buffers, (x, cos, sin, where.starts), strict=True):
            buffer.copy_(value)
        recording.forward.replay()
        return recording.inputs[-1].clone()

    @staticmethod
    def gradients(recording: Recording, dy: Tensor) -> list[Tensor]:
        """Gradients of the adapters, copies of their own."""
        recording.dy.copy_(dy)
        recording.backward.replay()
        copy, found, start = recording.flat.clone(), [], 0
        for grad in recording.grads:
            found.append(copy[start : start + grad.numel()].view_as(grad))
            start += grad.numel()
        return found

    def _parameters(self) -> list[Tensor] | None:
        """A and B of every adapter in the order of their gradients; None if one is switched off or in another dtype."""
        found: list[Tensor] = []
        addresses: list[int] = []
        for layer in self._decoder.layers:
            for group in layer.groups:
                addresses += [base.weight.data_ptr() for base in group.bases]
                for lora in group.loras:
                    if lora is not None:
                        if not lora.enabled or lora.lora_A.dtype != torch.float32:
                            return None
                        found += [lora.lora_A, lora.lora_B]
        addresses += [parameter.data_ptr() for parameter in found]
        if addresses != self._addresses:  # recordings hold addresses
            self.release()
            self._addresses = addresses
        return found or None

    def _find(self, key: tuple[int, int], x: Tensor, cos: Tensor, parameters: list[Tensor]) -> Recording | None:
        self._seen[key] += 1
        if key in self._recordings:
            return self._recordings[key]
        if self._seen[key] < 2 and self._earlier[key] < _PAYS:
            return None
        if free_bytes(x.device) < self._min_free:
            return None
        try:
            with torch.no_grad():
                self._recordings[key] = self._record(key, x, cos, parameters)
        except RuntimeError as error:
            _log.warning("layers run unrecorded from now on: %s", " ".join(str(error).split())[:200])
            self._failed = True
            drop_frames(error)
            self.release()
            return None
        segments = torch.cuda.memory_snapshot()
        self.pool_bytes = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))
        _log.info("layers recorded as CUDA graphs for %d tokens in %d sequences", *key)
        return self._recordings[key]

    def _record(self, key: tuple[int, int], x: Tensor, cos: Tensor, parameters: list[Tensor]) -> Recording:
        tokens, sequences = key
        depth = len(self._decoder.layers) + 2
        if self._buffers is None or self._buffers.shape[1] < tokens:
            self._recordings.clear()  # they hold addresses in the smaller buffer
            self._buffers = None
            gc.collect()
            self._buffers = x.new_zeros(depth, tokens, x.shape[1])
        if not self._grads:
            self._flat = torch.zeros(sum(p.numel() for p in parameters), device=x.device)
            sizes = [p.numel() for p in parameters]
            self._grads = [part.view_as(p) for part, p in zip(self._flat.split(sizes), parameters, strict=True)]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        rows = list(self._buffers[:, :tokens].unbind(0))
        starts = torch.full((sequences + 1,), tokens, dtype=torch.int32, device=x.device)
        starts[0] = 0
        turns = [cos.new_zeros(tokens, cos.shape[1]) for _ in range(2)]
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        made = Recording(forward, backward, rows[:-1], turns[0], turns[1], starts, rows[-1], self._grads, self._flat)
        if key not in self._loaded:  # kernels are compiled and loaded before the recording, which allows neither
            self._forward(made)
            self._backward(made)
            self._loaded.add(key)
        torch.cuda.synchronize(x.device)
        with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
            self._forward(made)
        with torch.cuda.graph(backward, pool=self._pool, capture_error_mode="thread_local"):
            self._backward(made)
        return made

    def _calls(self, recording: Recording) -> list[Call]:
        tokens = len(recording.dy)
        adapters, _ = self._decoder.adapters(recording.dy.dtype)
        where = Sequences(recording.starts, [tokens])  # the longest a sequence can be
        turns, chunk = (recording.cos, recording.sin), self._decoder.chunk_tokens
        return [
            Call(layer, copies, *turns, where, True, "triton", chunk)
            for layer, copies in zip(self._decoder.layers, adapters, strict=True)
        ]

    def _forward(self, recording: Recording) -> None:
        for index, call in enumerate(self._calls(recording)):
            layer_forward(call, recording.inputs[index], recording.inputs[index + 1])

    def _backward(self, recording: Recording) -> None:
        dy: Tensor | None = recording.dy
        end = len(recording.grads)
        for index, call in reversed(list(enumerate(self._calls(recording)))):
            assert dy is not None
            dy, grads = layer_backward(call, recording.inputs[index], dy, None, index > 0)
            torch._foreach_copy_(recording.grads[end - len(grads) : end], grads)
            end -= len(grads)


class _Graphed(torch.autograd.Function):
    """All layers; inputs after the sequences are the adapters' parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        graphs: LayerGraphs,
        recording: Recording,
        cos: Tensor,
        sin: Tensor,
        where: Sequences,
        *parameters: Tensor,
    ) -> Tensor:
        del parameters
        y = graphs.replay(recording, x, cos, sin, where)
        ctx.save_for_backward(x, cos, sin)
        ctx.graphs, ctx.recording, ctx.where, ctx.serial = graphs, recording, where, graphs.serial
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        graphs = ctx.graphs
        if ctx.serial != graphs.serial:  # another forward has been over the layer inputs
            graphs.replay(ctx.recording, *ctx.saved_tensors, ctx.where)
        return None, None, None, None, None, None, *graphs.gradients(ctx.recording, dy)
