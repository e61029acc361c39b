"""A rollout engine of your own: Hugging Face transformers in place of vLLM, one response at a time,
on the quickstart's additions. It shows all that an engine must have (rlhf_mc/rollout/base.py).

make quickstart  (once: it makes model and questions)
python examples/transformers_engine.py [section.key=value ...]  (or torchrun --nproc-per-node 2 ...)

A run of the command line takes this file as well:
python -m rlhf_mc configs/quickstart.yaml rollout.name=custom \\
    rollout.custom_engine.path=examples/transformers_engine.py
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessorList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_mc import platform
from rlhf_mc.api import Trainer
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, RolloutConfig
from rlhf_mc.data.batch import Generation
from rlhf_mc.reshard.layout import Layout, hf_layout
from rlhf_mc.rollout.base import KV_CACHE, WEIGHTS, Request, RolloutEngine, Sampling

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


class Engine:
    """The engine before it is built: rollout.custom_engine.path names this file."""

    title = "transformers"

    def layout(self, shape: ModelShape, tp_rank: int, tp_size: int) -> Layout:
        """Return the layout: every tensor whole, under its name in the checkpoint."""
        return hf_layout(shape)

    def check_layout(self, shape: ModelShape, tp_size: int) -> None:
        """Raise UserError if the engine cannot shard the model so."""
        if tp_size > 1:
            raise UserError(
                f"tensor_model_parallel_size {tp_size} (transformers): sizes that work: 1"
            )
        if shape.num_experts:
            raise UserError(
                f"a {shape.family} model (transformers): its parameters of experts are not the "
                "checkpoint's"
            )

    def check_installation(self) -> None:
        """Do nothing: this file has imported transformers."""

    def check_model(self, shape: ModelShape, cfg: RolloutConfig) -> None:
        """Raise UserError if the engine does not have a setting."""
        self.check_layout(shape, cfg.tensor_model_parallel_size)
        if cfg.free_cache_engine or cfg.quantization is not None:
            raise UserError(
                "rollout: the engine of transformers has neither free_cache_engine nor quantization"
            )

    def build(
        self,
        cfg: Config,
        shape: ModelShape,
        groups: Sequence[Sequence[int]],
        rank: int,
        storage: Mapping[str, torch.Tensor],
    ) -> RolloutEngine:
        """Return this rank's engine."""
        return TransformersEngine(cfg, groups, storage)


class TransformersEngine:
    """This rank's engine. Before the first weight update its weights are random."""

    def __init__(
        self, cfg: Config, groups: Sequence[Sequence[int]], storage: Mapping[str, torch.Tensor]
    ) -> None:
        config = AutoConfig.from_pretrained(cfg.model.path)
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, cfg.actor.megatron.dtype)
        )
        self._device = platform.device()
        self._model = model.to(self._device).eval()
        for name, param in self._model.named_parameters():
            param.data = storage.get(name, param.data)
        self.groups = groups
        self.max_running = 1
        self.cached_token_cost = 0.0  # it has no KV cache
        self._waiting: deque[tuple[Request, Sampling]] = deque()
        self.awake = frozenset({WEIGHTS, KV_CACHE})

    @property
    def summary(self) -> str:
        """One line of text for the console."""
        return "transformers, one response at a time"

    @property
    def num_parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(param.numel() for param in self._model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of these parameters."""
        return sum(param.numel() * param.element_size() for param in self._model.parameters())

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """The parameters, by the names of the layout; the weight update writes them in place."""
        return {name: param.data for name, param in self._model.named_parameters()}

    def weights_updated(self) -> None:
        """Do nothing: no computed value outlives a response."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were added and have not ended."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return 0: a request ends in the step in which it begins."""
        return 0

    def add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Add requests."""
        self._waiting.extend((request, sampling) for request in requests)

    def step(self) -> dict[int, Generation]:
        """Generate a whole response: a step may draw any number of tokens."""
        request, sampling = self._waiting.popleft()
        with torch.inference_mode():
            return {request.number: self._response(request, sampling)}

    def abort(self) -> dict[int, Generation]:
        """End all requests: none has begun."""
        begun = {request.number: request.partial for request, _ in self._waiting}
        self._waiting.clear()
        return begun

    def _response(self, request: Request, sampling: Sampling) -> Generation:
        """Return a response, with its log-probs at the sampling temperature."""
        assert not request.partial.token_ids, "each response is generated whole"
        limit = request.max_tokens or sampling.max_tokens
        warpers = LogitsProcessorList()
        if sampling.top_k > 0:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        generator = torch.Generator().manual_seed(request.seed)
        inputs = torch.from_numpy(request.prompt).long()[None].to(self._device)
        cache = None
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < limit and not (tokens and tokens[-1] in sampling.stop_token_ids):
            outputs = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits = outputs.logits[0, -1:].float() / (sampling.temperature or 1.0)
            distribution = warpers(inputs, logits)[0].log_softmax(-1).cpu()
            greedy = sampling.temperature == 0
            token = (
                distribution.argmax()
                if greedy
                else distribution.exp().multinomial(1, generator=generator)[0]
            )
            tokens.append(int(token))
            log_probs.append(float(distribution[token]))
            inputs = token.view(1, 1).to(self._device)
        return Generation(tokens, log_probs, finished=tokens[-1] in sampling.stop_token_ids)

    def sleep(self) -> None:
        """Raise RuntimeError: rollout.free_cache_engine is refused."""
        raise RuntimeError("the engine of transformers does not sleep")

    def wake_up(self, part: str) -> None:
        """Raise RuntimeError: rollout.free_cache_engine is refused."""
        raise RuntimeError("the engine of transformers does not sleep")

    def close(self) -> None:
        """Free the model."""
        del self._model


def main() -> None:
    overrides = [
        "rollout.name=custom",
        f"rollout.custom_engine.path={__file__}",
        "trainer.default_local_dir=runs/transformers_engine",
        "trainer.logger=[jsonl]",
    ]
    for step in Trainer(CONFIG, [*overrides, *sys.argv[1:]]):
        if os.environ.get("RANK", "0") == "0":
            score, difference = (
                step.metrics[key]
                for key in ("critic/score/mean", "training/rollout_logprobs_diff_max")
            )
            print(
                f"step {step.number}: mean score {score:.3f}, log-probs within {difference:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
