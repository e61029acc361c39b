"""Functions that the ranks run in test_models.py and test_convert.py: engines alone, without vLLM
and the loop. Each is called on every rank with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_parts.engines import (
    TEMPERATURE,
    Job,
    Role,
    actor_config,
    critic_config,
    logical_tensors,
    make_engine,
    mesh_groups,
    score_tokens,
    value_head_weight,
)
from gpu_parts.engines import my_micro_batches as _my_micro_batches
from gpu_parts.engines import objective as _objective

from rlhf_mc.algorithms.policy_losses import POLICY_LOSSES
from rlhf_mc.checkpoint.hf_format import HFReader, import_hf
from rlhf_mc.checkpoint.megatron_format import load_mcore, save_mcore
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import ActorConfig, MegatronConfig, OptimConfig
from rlhf_mc.data.batch import Prompt, RaggedBatch
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.data.tokenizer import load_tokenizer
from rlhf_mc.health.adjustments import Adjustments
from rlhf_mc.models import gpt_model, heads
from rlhf_mc.models.engine import Loss, ModelEngine, engine_layouts
from rlhf_mc.models.forward import MicroBatch
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.models.heads import log_prob_head, log_probs_and_entropy, value_head
from rlhf_mc.topology.groups import ProcessGroups
from rlhf_mc.trainer import reward_models
from rlhf_mc.trainer.reward_models import RewardModel, score_sequences
from rlhf_mc.trainer.skipped_updates import SkippedUpdates
from rlhf_mc.trainer.token_budget import TokenBudget
from rlhf_mc.trainer.update import ActorTerms, actor_objective, mini_batches, update

__all__ = ["Role", "actor_config", "critic_config", "value_head_weight"]


def log_probs(
    checkpoints: Sequence[str],
    tp: int,
    pp: int,
    batch: RaggedBatch,
    budget: int,
    ep: int = 1,
    vpp: int = 1,
    cp: int = 1,
    dynamic_cp: bool = False,
    **megatron: Any,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return for each checkpoint (log-probs [R], entropies [R]) by ModelEngine.score."""
    out = {}
    with mesh_groups(tp, pp, ep, vpp, cp, dynamic_cp) as groups:
        for checkpoint in checkpoints:
            engine = make_engine(checkpoint, "actor", groups, **megatron)
            out[checkpoint] = (
                _log_probs(engine, batch, budget),
                _entropies(engine, batch, budget),
            )
    return out


def _log_probs(engine: ModelEngine, batch: RaggedBatch, budget: int) -> torch.Tensor:
    head = log_prob_head(engine.shape.vocab_size, TEMPERATURE)
    return score_tokens(engine, batch, head, budget)


def _entropies(engine: ModelEngine, batch: RaggedBatch, budget: int) -> torch.Tensor:
    vocab = engine.shape.vocab_size

    def head(model: object, states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return micro.all_results(
            log_probs_and_entropy(model, states, micro.targets, vocab, TEMPERATURE)[1]
        )

    return score_tokens(engine, batch, head, budget)


def scores_and_values(
    checkpoint: str, tp: int, pp: int, batch: RaggedBatch, cp: int = 1, **megatron: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (each sequence's score, each response token's value) by the checkpoint's own value
    head."""
    with mesh_groups(tp, pp, cp=cp) as groups:
        engine = reward_engine(checkpoint, groups, **megatron)
        return score_sequences(engine, batch, 32), score_tokens(engine, batch, value_head, 32)


def conversation_scores(
    checkpoint: str,
    actor: str,
    pp: int,
    prompts: Sequence[Prompt],
    batch: RaggedBatch,
    asked: Sequence[int],
) -> list[tuple[torch.Tensor, int]]:
    """Return the results of reward_models.score for the sequences `asked`: of a reward model that
    reads the tokens of its own tokenizer, in micro-batches of at most 40, and of one that reads the
    actor's."""
    with mesh_groups(1, pp) as groups:
        conversations = ConversationTokenizer("reward_model", checkpoint, None)
        engine = reward_engine(checkpoint, groups)
        models = [
            RewardModel("reward_model", "", engine, *limit_and_own)
            for limit_and_own in ((40, conversations), (99, None))
        ]
        tokenizer = load_tokenizer(actor)
        return [reward_models.score(model, tokenizer, prompts, batch, asked) for model in models]


def reward_engine(checkpoint: str, groups: ProcessGroups, **megatron: Any) -> ModelEngine:
    """Return the model of a classifier of one label, in float32 and in the layout of the groups."""
    reader = HFReader(checkpoint)
    mesh = groups.mesh
    config = MegatronConfig(mesh.tp, mesh.pp, mesh.cp, dtype="float32", **megatron)
    engine = ModelEngine("reward_model", reader.shape(value_head=True), config, groups)
    import_hf(reader, engine_layouts(engine)[groups.rank], engine.params)
    return engine


def gradients(
    jobs: Sequence[Job],
    tp: int,
    pp: int,
    batch: RaggedBatch,
    ep: int = 1,
    vpp: int = 1,
    chunk_logits: int = heads.CHUNK_LOGITS,
    cp: int = 1,
    dynamic_cp: bool = False,
    **megatron: Any,
) -> dict[Job, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Return for each job (statistics, gradient of each logical tensor as gathered on this rank).
    `chunk_logits` replaces heads.CHUNK_LOGITS; `megatron` are further settings of the engine.
    """
    out = {}
    engines: dict[tuple[str, Role], ModelEngine] = {}
    mesh = (tp, pp, ep, vpp, cp, dynamic_cp)
    with mesh_groups(*mesh) as groups, mock.patch.object(heads, "CHUNK_LOGITS", chunk_logits):
        for job in jobs:
            key = (job.checkpoint, job.role)
            if key not in engines:
                engines[key] = make_engine(*key, groups, **megatron)
                engines[key].make_trainable(OptimConfig(), total_steps=1)
            engine = engines[key]
            out[job] = _gradients(engine, batch, job)
    return out


def log_probs_and_gradients(
    jobs: Sequence[Job],
    tp: int,
    pp: int,
    batch: RaggedBatch,
    ep: int = 1,
    vpp: int = 1,
    cp: int = 1,
    entropies: bool = False,
    **megatron: Any,
) -> dict[Job, tuple[list[torch.Tensor], dict[str, float], dict[str, torch.Tensor]]]:
    """Return for each job what one engine has: of an actor's the log-probs [R] of the whole batch
    and, if asked for, the entropies [R]; then statistics and gradients as `gradients` does."""
    out = {}
    with mesh_groups(tp, pp, ep, vpp, cp) as groups:
        for job in jobs:
            engine = make_engine(job.checkpoint, job.role, groups, **megatron)
            scores = []
            if job.role == "actor":
                scores.append(_log_probs(engine, batch, job.budget))
                if entropies:
                    scores.append(_entropies(engine, batch, job.budget))
            engine.make_trainable(OptimConfig(), total_steps=1)
            out[job] = (scores, *_gradients(engine, batch, job))
    return out


def _gradients(
    engine: ModelEngine, batch: RaggedBatch, job: Job
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    mini = batch.select(job.sequences)
    stats = engine.backward(
        mini, _my_micro_batches(engine, mini, job.budget), _objective(engine, mini, job.mode)
    )
    grads = {
        name: param.main_grad
        for name, param in engine.named_parameters().items()
        if param.requires_grad
    }
    return stats, logical_tensors(engine, grads)


def saved_activations(
    checkpoint: str, batch: RaggedBatch, cp: int = 1, **megatron: Any
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (bytes of activations that the forward pass of one micro-batch saves for backward, the
    gradients)."""
    saved: dict[int, int] = {}
    bytes_at_loss: list[int] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with mesh_groups(1, 1, cp=cp) as groups:
        engine = make_engine(checkpoint, "actor", groups, **megatron)
        engine.make_trainable(OptimConfig(), total_steps=1)
        objective = _objective(engine, batch, "token-mean")
        params = {param.untyped_storage().data_ptr() for param in engine.model.parameters()}

        def loss(model: PackedGPT, states: torch.Tensor, micro: MicroBatch) -> Any:
            bytes_at_loss.append(
                sum(size for pointer, size in saved.items() if pointer not in params)
            )
            return objective(model, states, micro)

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            engine.backward(batch, [list(range(batch.num_sequences))], loss)
        grads = {name: param.main_grad.clone() for name, param in engine.model.named_parameters()}
    return bytes_at_loss[0], grads


def saved_activations_of(modules: list[str], checkpoint: str, batch: RaggedBatch) -> Any:
    """Return saved_activations with selective recomputation of these modules of Megatron-Core."""
    with mock.patch.object(gpt_model, "recompute_modules", lambda *args: modules):
        return saved_activations(checkpoint, batch, recompute_granularity="selective")


def weights_after_steps(
    checkpoint: str,
    tp: int,
    pp: int,
    batch: RaggedBatch,
    distributed_optimizer: bool,
    optim: OptimConfig,
    steps: int,
    cp: int = 1,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return (the first step's gradient norm, each logical weight after the steps as gathered on
    this rank)."""
    norms = []
    with mesh_groups(tp, pp, cp=cp) as groups:
        engine = make_engine(
            checkpoint, "actor", groups, use_distributed_optimizer=distributed_optimizer
        )
        engine.make_trainable(optim, total_steps=1)
        for _ in range(steps):
            micro_batches = _my_micro_batches(engine, batch, 48)
            norms.append(
                engine.train_step(
                    batch, micro_batches, _objective(engine, batch, "token-mean")
                ).grad_norm
            )
        return norms[0], logical_tensors(engine, engine.params)


def first_update(checkpoint: str, tp: int, pp: int, batch: RaggedBatch) -> dict[str, float]:
    """Return the metrics of one update whose old log-probs come from the same weights in other
    micro-batches. The k2 loss against them is half the mean square of the log-ratio, in which
    nothing cancels.
    """
    config = ActorConfig(use_kl_loss=True, kl_loss_type="k2")
    with mesh_groups(tp, pp) as groups:
        engine = make_engine(checkpoint, "actor", groups, use_distributed_optimizer=True)
        engine.make_trainable(OptimConfig(), total_steps=1)
        vocab = engine.shape.vocab_size
        terms = ActorTerms(POLICY_LOSSES["vanilla"], 0.0, 0.0, 1, torch.Generator())
        old = score_tokens(engine, batch, log_prob_head(vocab, TEMPERATURE), 64)
        batch = batch.with_fields(old_log_probs=old, ref_log_probs=old)
        order = mini_batches(
            batch.num_sequences, 1, batch.num_sequences, epochs=1, shuffle=True, seed=(1, 2)
        )
        _, metrics = update(
            engine,
            batch,
            order,
            lambda mini: actor_objective(mini, config, vocab, TEMPERATURE, terms),
            TokenBudget("actor", 1, 32, 32, Adjustments(Path())),
            SkippedUpdates(1, Path()),
        )
        return metrics


def updates_with_bad_losses(
    checkpoint: str,
    batch: RaggedBatch,
    bad: Sequence[bool],
    limit: int,
    directory: str,
    **megatron: Any,
) -> list[dict[str, Any]]:
    """Run an update of one mini-batch per item of `bad`; where it is true, the last rank's loss is
    NaN. Return for each update its error message or metrics, and the parameters and optimizer
    states that it changed.
    """
    out = []
    world = dist.get_world_size()
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups, **megatron)
        engine.make_trainable(OptimConfig(lr=1e-3), total_steps=1)
        skipped = SkippedUpdates(limit, Path(directory))

        def objective(mini: RaggedBatch) -> Loss:
            loss = _objective(engine, mini, "token-mean")

            def maybe_bad(model: PackedGPT, states: torch.Tensor, micro: MicroBatch) -> Any:
                value, stats = loss(model, states, micro)
                is_bad = bad[len(out)] and dist.get_rank() == world - 1
                return (value * torch.nan if is_bad else value), stats

            return maybe_bad

        for step in range(len(bad)):
            before = _parameters_and_states(engine)
            order = iter([list(range(batch.num_sequences))])
            result: dict[str, Any] = {}
            try:
                _, result["metrics"] = update(
                    engine,
                    batch,
                    order,
                    objective,
                    TokenBudget("actor", step, 48, 48, Adjustments(Path())),
                    skipped,
                )
            except UserError as error:
                result["error"] = str(error)
            after = _parameters_and_states(engine)
            result["changed"] = [
                n for n, x in after.items() if n not in before or not torch.equal(before[n], x)
            ]
            out.append(result)
    return out


def _parameters_and_states(engine: ModelEngine) -> dict[str, torch.Tensor]:
    """Return copies of this rank's parameters and of all tensors of its optimizer."""
    out = {name: param.clone() for name, param in engine.params.items()}
    for part in engine.strategy.optimizer.chained_optimizers:
        for number, state in enumerate(part.optimizer.state.values()):
            tensors = {
                key: value for key, value in state.items() if isinstance(value, torch.Tensor)
            }
            out.update({f"{number}.{key}": value.clone() for key, value in tensors.items()})
    return out


def bfloat16_steps(
    checkpoint: str, batch: RaggedBatch, distributed_optimizer: bool, steps: int
) -> dict[str, Any]:
    """Train bfloat16 weights in steps of 4e-5 in one direction. Return the dtypes of weights, main
    parameters, gradients and moments, and the share of large weights that differ from the start
    after one step and after all.
    """
    optim = OptimConfig(lr=4e-5, weight_decay=0.0, clip_grad=0.0, eps=1e-20)
    with mesh_groups(1, 1) as groups:
        engine = make_engine(
            checkpoint,
            "actor",
            groups,
            dtype="bfloat16",
            use_distributed_optimizer=distributed_optimizer,
        )
        engine.make_trainable(optim, total_steps=1)
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        weight = engine.params[name]
        start = weight.clone()
        large = start.abs() > 0.02
        moved = []
        for _ in range(steps):
            objective = _objective(engine, batch, "token-mean")
            engine.train_step(batch, _my_micro_batches(engine, batch, 48), objective)
            moved.append(float((weight != start)[large].float().mean()))
        params = list(engine.model.parameters())
        states = engine.strategy.optimizer.chained_optimizers[0].optimizer.state
        return {
            "weights": {str(p.dtype) for p in params},
            "main": {str(p.main_param.dtype) for p in params if p.main_param is not None},
            "grads": {str(p.main_grad.dtype) for p in params},
            "moments": {str(s["exp_avg"].dtype) for s in states.values()},
            "moved_first": moved[0],
            "moved_last": moved[-1],
        }


def params_unlike_hf(checkpoint: str, converted: str, tp: int, pp: int) -> list[str]:
    """Return the names of this rank's parameters that differ between the Megatron and the Hugging
    Face checkpoint."""
    with mesh_groups(tp, pp) as groups:
        dtype = HFReader(checkpoint).dtype_name()
        wanted = make_engine(checkpoint, "actor", groups, dtype=dtype)
        loaded = ModelEngine("actor", wanted.shape, wanted._megatron, groups)
        for param in loaded.params.values():
            param.fill_(torch.nan)
        load_mcore(loaded.model, converted)
        return [
            name
            for name, param in loaded.params.items()
            if not torch.equal(param, wanted.params[name])
        ]


def error_of_loading_nan(checkpoint: str, directory: str, tp: int) -> str:
    """Save a Megatron checkpoint with one NaN on the last rank. Return the error message of loading
    it."""

    def set_nan(params: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            params["decoder.layers.1.mlp.linear_fc2.weight"].view(-1)[-1] = torch.nan

    return _error_of_loading_changed(checkpoint, directory, tp, 1, set_nan)


def error_of_loading_zeros(
    checkpoint: str, directory: str, tp: int, pp: int, ranks: list[int]
) -> str:
    """Save a Megatron checkpoint whose first query, key and value weights of these ranks are zero.
    Return the error message of loading it."""

    def set_zero(params: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() in ranks:
            params["decoder.layers.0.self_attention.linear_qkv.weight"].zero_()

    return _error_of_loading_changed(checkpoint, directory, tp, pp, set_zero)


def _error_of_loading_changed(
    checkpoint: str,
    directory: str,
    tp: int,
    pp: int,
    change: Callable[[dict[str, torch.Tensor]], None],
) -> str:
    with mesh_groups(tp, pp) as groups:
        engine = make_engine(checkpoint, "actor", groups)
        change(engine.params)
        save_mcore(engine.model, directory, HFReader(checkpoint))
        try:
            load_mcore(engine.model, directory)
        except UserError as error:
            return str(error)
    return "no error"


def error_of_loading(checkpoint: str, converted: str) -> str:
    """Return the error message of loading a Megatron checkpoint into this model."""
    with mesh_groups(1, 1) as groups:
        engine = make_engine(checkpoint, "actor", groups)
        try:
            load_mcore(engine.model, converted)
        except UserError as error:
            return str(error)
    return "no error"
