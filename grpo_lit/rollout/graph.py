"""The fast engine: our own decode loop over the weights that are trained, 4-bit base and live adapters included.

Each prompt is prefilled once by transformers' own forward and shared by its group; then every step of every row runs
in one CUDA graph (`decode`), over keys and values in pages (`pages`), with rows admitted and compacted as they end
(`flight`). The same code runs on the CPU without graphs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_lit.policy import Policy
from grpo_lit.rollout.base import Claim, Progress, Rollout, SamplingConfig, check_lengths, left_pad
from grpo_lit.rollout.decode import DecodeStep, rotary_tables
from grpo_lit.rollout.flight import Flight
from grpo_lit.rollout.graph_runner import DecodeBuffers, GraphRunner
from grpo_lit.rollout.hf import eos_token_ids, max_positions
from grpo_lit.rollout.model_reader import ModelSpec, read_model
from grpo_lit.rollout.plan import MAX_ROWS, RolloutPlan, free_bytes, plan_rollout
from grpo_lit.rollout.sampling import uniforms
from grpo_lit.rollout.stats import RolloutStats, copy_bandwidth
from grpo_lit.rollout.stops import AnswerStop


class GraphEngine:
    """Samples with our own decode loop; see the module's docstring.

    Args:
        policy: the policy; its adapters are live.
        tokenizer: for the pad and EOS tokens.
        batch_size: rows in flight at once; None takes as many as fit.
        check_every: steps queued between two looks at how far the rows are; None is 1 on the CPU, and on CUDA up to
            8, less for short completions, whose slots should not lie idle for long.
        use_graphs: record steps in CUDA graphs; None does on CUDA.
        impl: of every op, "triton" or "torch"; None picks by device.

    Raises:
        UnsupportedModel: no decode step for this model.
    """

    name = "graph"

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None = None,
        check_every: int | None = None,
        use_graphs: bool | None = None,
        impl: str | None = None,
    ) -> None:
        on_cuda = self._on_cuda = policy.device.type == "cuda"
        self.policy = policy
        self.tokenizer = tokenizer
        self.batch_size: int | None = batch_size
        self.claim: Claim | None = None
        self.check_every = check_every
        self.depth = 1 if on_cuda else 0
        self.use_graphs = on_cuda if use_graphs is None else use_graphs
        self.impl = impl
        self.eos_token_ids = eos_token_ids(policy, tokenizer)
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.stats = RolloutStats(weight_bytes=read_model(policy).weight_bytes)
        self._warm: set[object] = set()
        self._held: tuple[object, DecodeBuffers, GraphRunner] | None = None
        self.cache_bytes = 0  # of the last rollout's keys and values

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Progress | None = None,
    ) -> Rollout:
        """Sample; see `RolloutEngine.generate`. All tensors of the result lie on the policy's device.

        Raises:
            UserError: an empty prompt, or a row longer than the model has positions.
        """
        start = time.perf_counter()
        spec = read_model(self.policy)
        check_lengths(prompts, counts, sampling, max_positions(self.policy))
        try:
            with torch.no_grad(), torch.cuda.device(self.policy.device if self._on_cuda else -1):
                rollout, num_steps = self._generate(spec, prompts, counts, keys, sampling, progress)
        except BaseException:  # out of memory, Ctrl-C: nothing may stay behind
            self.release()
            raise
        if self._on_cuda:
            torch.cuda.synchronize(self.policy.device)
        self.stats.num_steps += num_steps
        self.stats.num_tokens += int(rollout.completion_mask.sum())
        self.stats.seconds += time.perf_counter() - start
        return rollout

    def release(self) -> None:
        """Free cache and graphs."""
        if self._held is not None:
            self._held[2].close()
            self._held = None

    def weights_changed(self) -> None:
        """Nothing to do: these are the trained weights."""

    def close(self) -> None:
        """Free everything."""
        self.release()

    def step_metrics(self) -> dict[str, float]:
        """Achieved share of the weight-read limit since the last call, see `RolloutStats.bandwidth_share`."""
        return self.stats.take_metrics()

    def _generate(
        self,
        spec: ModelSpec,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Progress | None,
    ) -> tuple[Rollout, int]:
        plan = plan_rollout(
            [len(prompt) for prompt in prompts],
            counts,
            sampling.max_completion_length,
            batch_size=self.batch_size,
            shape=spec.cache,
            vocab_size=spec.vocab_size,
            budget_bytes=self._budget(),
        )
        buffers, runner = self._prepare(spec, plan, sampling)
        if plan.num_rows:
            buffers.state.table[: plan.num_rows] = uniforms(keys, plan.max_new_tokens).to(buffers.state.table.device)
        flight = Flight(
            self.policy,
            buffers,
            runner,
            prompts,
            counts,
            stop=None if sampling.stop_at is None else AnswerStop(self.tokenizer, sampling.stop_at),
            check_every=self.check_every or (min(8, max(1, plan.max_new_tokens // 16)) if self._on_cuda else 1),
            depth=self.depth,
            progress=progress,
            claim=self.claim,
        )
        flight.run()
        return self._assemble(prompts, flight, buffers), flight.num_steps

    def _budget(self) -> float:
        """Memory for a rollout; what is held from the last one counts, since it is reused or freed."""
        held = 0 if self._held is None else self._held[1].cache.storage.nbytes
        return free_bytes(self.policy.device) + held

    def _prepare(
        self, spec: ModelSpec, plan: RolloutPlan, sampling: SamplingConfig
    ) -> tuple[DecodeBuffers, GraphRunner]:
        """Buffers and runner for a plan; those of the last call where nothing differs."""
        if self._on_cuda and not self.stats.bandwidth:
            self.stats.bandwidth = copy_bandwidth(self.policy.device)
        drawing = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        key = (plan, drawing, spec.fingerprint)
        if self._held is not None and self._held[0] == key:
            return self._held[1], self._held[2]
        self.release()
        device = self.policy.device
        buffers = DecodeBuffers(plan, spec.cache, device, self._fixed_slots(spec))
        self.cache_bytes = buffers.cache.storage.nbytes
        eos = torch.tensor(self.eos_token_ids, device=device)
        rotary = rotary_tables(self.policy, plan.num_positions)
        step = DecodeStep(spec, buffers.cache, rotary, sampling, eos, impl=self.impl)
        runner = GraphRunner(step, buffers, self._warm, use_graphs=self.use_graphs)
        self._held = (key, buffers, runner)
        return buffers, runner

    def _fixed_slots(self, spec: ModelSpec) -> int | None:
        """Slots of every step in float32 on CUDA; None elsewhere.

        A product's rounding depends on the number of rows it is computed for, and a draw from the tail of a large
        vocabulary flips at a difference of 1e-5. With one number for all steps a row is the same to the last bit
        whatever else is in flight; in 16 bits, where rounding is coarser than that anyway, speed goes first.
        """
        return MAX_ROWS if self._on_cuda and spec.cache.dtype == torch.float32 else None

    def _assemble(self, prompts: Sequence[Sequence[int]], flight: Flight, buffers: DecodeBuffers) -> Rollout:
        device = self.policy.device
        groups = [row.group for row in flight.rows]
        prompt_ids, prompt_mask = left_pad([prompts[group] for group in groups], self.pad_token_id)
        lengths = torch.tensor([row.length for row in flight.rows], dtype=torch.long, device=device)
        stopped = torch.tensor([row.stopped for row in flight.rows], dtype=torch.bool, device=device)
        width = max([1, *(row.length for row in flight.rows)])
        mask = torch.arange(width, device=device) < lengths.unsqueeze(-1)  # (N, T)
        ids: Tensor = buffers.state.out_ids[: len(groups), :width].masked_fill(~mask, self.pad_token_id)
        last = ids.gather(1, (lengths - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
        ended = torch.isin(last, torch.tensor(self.eos_token_ids, device=device))
        return Rollout(
            prompt_ids.to(device),
            prompt_mask.to(device),
            ids,
            mask,
            torch.tensor(groups, dtype=torch.long, device=device),
            buffers.state.out_logprobs[: len(groups), :width].masked_fill(~mask, 0.0),
            ~(ended | stopped),
        )
