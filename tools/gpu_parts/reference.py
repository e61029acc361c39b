"""The same computation in transformers, one sequence at a time: no packing, no padding, no
parallelism. Log-probs, and gradients of PPO's losses over the whole mini-batch at once."""

from __future__ import annotations

import itertools

import torch
from transformers import AutoModelForCausalLM

from gpu_parts.engines import (
    LOSS_SCALE_FACTOR,
    TEMPERATURE,
    Job,
    actor_config,
    critic_config,
    value_head_weight,
)
from rlhf_mc.algorithms.losses import ActorLossInputs, actor_loss, aggregation_weights, value_loss
from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES, PolicyLossInputs
from rlhf_mc.architectures.families import FAMILIES
from rlhf_mc.architectures.packed_experts import part_of_file
from rlhf_mc.checkpoint.packed_tensors import expert_view
from rlhf_mc.data.batch import RaggedBatch


class Reference:
    """The model of a checkpoint in transformers."""

    def __init__(
        self, checkpoint: str, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Read the checkpoint. dtype: of the weights and of the computation."""
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager"
        )
        # transformers gives the embedding of the padding token no gradient; here it is a token like
        # any other.
        model.get_input_embeddings().padding_idx = None
        self.model = model.to(device)
        self.device = device
        head = value_head_weight(self.model.config.hidden_size)
        self.score = torch.nn.Parameter(head.to(device, dtype))

    def _states(self, batch: RaggedBatch) -> list[torch.Tensor]:
        """Return for each sequence the final hidden states [drawn, hidden] before each token that
        was drawn."""
        return [
            self.model.model(seq[None]).last_hidden_state[0, :-1][mask[1:]]
            for seq, mask in self._sequences(batch)
        ]

    def _sequences(self, batch: RaggedBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens of each sequence, and which of them were drawn: both [tokens]."""
        lens = batch.seq_lens.tolist()
        mask = batch.response_mask
        if mask is None:
            after = [
                torch.arange(n) >= prompt
                for n, prompt in zip(lens, batch.prompt_lens.tolist(), strict=True)
            ]
            mask = torch.cat(after)
        tokens = batch.tokens.to(self.device).split(lens)
        return list(zip(tokens, mask.to(self.device).split(lens), strict=True))

    def log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probs [R], entropies [R]) in float32, on the host."""
        targets = torch.cat([tokens[mask] for tokens, mask in self._sequences(batch)]).long()
        logits = self.model.lm_head(torch.cat(self._states(batch))).float() / TEMPERATURE
        all_log_probs = logits.log_softmax(-1)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return all_log_probs.gather(1, targets[:, None])[:, 0].cpu(), entropy.cpu()

    def gradients(
        self, batch: RaggedBatch, job: Job
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return (statistics, gradients) of the whole mini-batch at once; the gradients by
        transformers' names."""
        self.model.zero_grad()
        self.score.grad = None
        mini = batch.select(job.sequences)
        loss, stats = (
            self._critic_loss(mini, job) if job.role == "critic" else self._actor_loss(mini, job)
        )
        loss.backward()
        named = [*self.model.named_parameters(), ("score.weight", self.score)]
        grads = {
            name: param.grad.to("cpu", copy=True) for name, param in named if param.grad is not None
        }
        return {name: float(value) for name, value in stats.items()}, grads

    def _actor_loss(
        self, mini: RaggedBatch, job: Job
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert mini.old_log_probs is not None and mini.advantages is not None
        cfg = actor_config(job.mode)
        log_probs, entropy = self.log_probs(mini)
        weights = aggregation_weights(mini.response_lens, job.mode, LOSS_SCALE_FACTOR)
        policy = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=mini.old_log_probs,
            advantages=mini.advantages,
            weights=weights,
            sequence=torch.repeat_interleave(mini.response_lens),
            num_tokens=len(log_probs),
            num_sequences=mini.num_sequences,
            clip_low=cfg.clip_ratio_low,
            clip_high=cfg.clip_ratio_high,
            clip_c=cfg.clip_ratio_c,
        )
        loss, stats = actor_loss(
            ActorLossInputs(policy, weights, entropy, mini.ref_log_probs),
            POLICY_LOSSES["vanilla"].function,
            entropy_coeff=cfg.entropy_coeff,
            kl_loss_coef=cfg.kl_loss_coef,
            kl_loss_type=cfg.kl_loss_type,
        )
        if mini.observation_lens is None or not mini.observation_lens.any():
            return loss, stats
        env_loss = self._env_loss(mini)
        loss = loss + cfg.env_loss_coef * env_loss
        return loss, {**stats, "env_loss": env_loss.detach(), "loss": loss.detach()}

    def _env_loss(self, mini: RaggedBatch) -> torch.Tensor:
        """Return the cross-entropy of the tokens of observations."""
        logits = []
        targets = []
        for (tokens, mask), prompt in zip(
            self._sequences(mini), mini.prompt_lens.tolist(), strict=True
        ):
            is_observed = ~mask & (torch.arange(len(tokens), device=self.device) >= prompt)
            states = self.model.model(tokens[None]).last_hidden_state[0, :-1][is_observed[1:]]
            logits.append(self.model.lm_head(states).float() / TEMPERATURE)
            targets.append(tokens[is_observed].long())
        return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(targets)).cpu()

    def _critic_loss(
        self, mini: RaggedBatch, job: Job
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert mini.values is not None and mini.returns is not None
        states = torch.cat(self._states(mini))
        values = torch.nn.functional.linear(states, self.score)[:, 0].float().cpu()
        weights = aggregation_weights(mini.response_lens, job.mode, LOSS_SCALE_FACTOR)
        cliprange = critic_config(job.mode).cliprange_value
        return value_loss(
            values, mini.values, mini.returns, weights, num_tokens=len(values), cliprange=cliprange
        )


def by_checkpoint_names(grads: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Return transformers' gradients by the names of the checkpoint. transformers keeps the experts
    of a layer in two tensors: gate and up fused, and down."""
    family = FAMILIES[model_type].expert_names
    if family is None:
        return grads
    if family.in_one_tensor == "columns":
        return _of_experts(grads, model_type)
    out = {}
    for name, grad in grads.items():
        prefix, is_expert, part = name.replace(".mlp.", f".{family.block}.").partition(".experts.")
        for number, of_expert in enumerate(grad) if is_expert else ():
            halves = of_expert.chunk(2) if part == "gate_up_proj" else [of_expert]
            names = (family.gate, family.up) if part == "gate_up_proj" else (family.down,)
            for projection, half in zip(names, halves, strict=True):
                out[f"{prefix}.experts.{number}.{projection}.weight"] = half
        if not is_expert:
            out[prefix] = grad
    return out


def _of_experts(grads: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Return the gradients of tensors that hold all experts of a layer by the names of each
    expert's."""
    out = {name: grad for name, grad in grads.items() if ".experts." not in name}
    projections = ("gate_proj", "up_proj", "down_proj")
    for (name, grad), projection, kind in itertools.product(
        grads.items(), projections, ("weight", "bias")
    ):
        for expert in range(len(grad)) if ".experts." in name else ():
            logical = f"{name.partition('.experts.')[0]}.experts.{expert}.{projection}.{kind}"
            tensor, part = part_of_file(model_type, logical)
            if part is not None and tensor == name:
                out[logical] = expert_view(grad, part)
    return out
