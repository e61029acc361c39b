"""Functions that the ranks run in test_family_models.py, in addition to cases.py and
model_cases.py."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
from collections.abc import Sequence

import torch
from cases import built_run
from megatron.core.dist_checkpointing.mapping import ShardedObject
from model_cases import TEMPERATURE, make_engine, mesh_groups
from vllm.model_executor.layers.attention import MLAAttention, mla_attention

from rlhf_mc.checkpoint import megatron_format
from rlhf_mc.checkpoint.hf_format import HFReader
from rlhf_mc.checkpoint.megatron_format import load_mcore, save_mcore
from rlhf_mc.data.batch import RaggedBatch
from rlhf_mc.models.engine import ModelEngine
from rlhf_mc.models.gpt_model import PackedGPT
from rlhf_mc.observability.metrics import PhaseTimer
from rlhf_mc.patching import replaced
from rlhf_mc.rollout import vllm_engine
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.trainer import log_probs, step_state
from rlhf_mc.trainer.pool import generate, rollout


def save_and_load(checkpoint: str, directory: str, ep: int, other_ep: int) -> list[str]:
    """Save the model as a Megatron checkpoint with its experts over `ep` ranks, and load it with
    them over `other_ep`. Return the names of this rank's parameters that then differ from the
    Hugging Face checkpoint.
    """
    with mesh_groups(1, 1, ep) as groups:
        save_mcore(make_engine(checkpoint, "actor", groups).model, directory, HFReader(checkpoint))
        assert mp.active_children() == [], "the save has started a process that stays"
    with mesh_groups(1, 1, other_ep) as groups:
        wanted = make_engine(checkpoint, "actor", groups)
        loaded = ModelEngine("actor", wanted.shape, wanted._megatron, groups)
        for param in loaded.params.values():
            param.fill_(torch.nan)
        load_mcore(loaded.model, directory)
        return [
            name
            for name, param in loaded.params.items()
            if not torch.equal(param, wanted.params[name])
        ]


def load_without_extra_states(checkpoint: str, directory: str) -> tuple[set[str], list[str]]:
    """Save the model as a Megatron checkpoint that has the weights alone, and load it. Return
    (names of the tensors in the checkpoint, this rank's parameters that then differ)."""
    sharded = megatron_format._sharded

    def weights(model: PackedGPT) -> dict[str, object]:
        return {
            name: value
            for name, value in sharded(model).items()
            if not isinstance(value, ShardedObject)
        }

    with mesh_groups(1, 1) as groups:
        wanted = make_engine(checkpoint, "actor", groups)
        with replaced(megatron_format, "_sharded", weights):
            save_mcore(wanted.model, directory, HFReader(checkpoint))
        loaded = ModelEngine("actor", wanted.shape, wanted._megatron, groups)
        load_mcore(loaded.model, directory)
        different = [
            name
            for name, param in loaded.params.items()
            if not torch.equal(param, wanted.params[name])
        ]
        return set(megatron_format._stored_tensors(directory)), different


def derived_after_update(config_path: str) -> list[bool]:
    """Return whether the weights that vLLM derives from kv_b_proj are those of the weights after an
    update: if they are no views of it and nothing derives them again, as views, and derived again
    into tensors of their own."""
    found = []
    with built_run(config_path, []) as run:
        model = run.rollout._model
        for own, derives in ((True, False), (False, False), (True, True)):
            layers = [module for module in model.modules() if isinstance(module, MLAAttention)]
            assert layers
            for layer in layers:
                wanted = mla_attention.split_kv_b_proj(
                    layer.kv_b_proj,
                    torch.float32,
                    layer.kv_lora_rank,
                    layer.num_heads,
                    layer.qk_nope_head_dim,
                    layer.v_head_dim,
                )
                views = (wanted[0].permute(1, 2, 0), wanted[1].transpose(0, 1))
                for name, view in zip(("W_UK_T", "W_UV"), views, strict=True):
                    setattr(
                        layer,
                        name,
                        torch.nn.Parameter(view.clone() if own else view, requires_grad=False),
                    )
            for param in run.actor.params.values():
                param.add_(1.0)
            with contextlib.ExitStack() as stack:
                if not derives:
                    stack.enter_context(replaced(vllm_engine, "derive_weights", lambda model: None))
                generate.update_weights(run, PhaseTimer())
            pairs = [
                (layer.W_UV.transpose(0, 1), layer.W_UK_T.permute(2, 0, 1), layer.kv_b_proj.weight)
                for layer in layers
            ]
            joined = [torch.cat((k, v), dim=-1).flatten(1).T for v, k, _ in pairs]
            found.append(
                all(torch.equal(got, pair[2]) for got, pair in zip(joined, pairs, strict=True))
            )
    return found


def sample_and_score(config_path: str, models: Sequence[str]) -> list[RaggedBatch]:
    """Return for each model a batch sampled by vLLM, with vLLM's log-probs and the trainer's."""
    batches = []
    for model in models:
        overrides = [f"model.path={model}", f"rollout.temperature={TEMPERATURE}"]
        with built_run(config_path, overrides) as run:
            state = step_state.begin_step(1, RankStatus())
            generate.update_weights(run, state.timer)
            batches.append(log_probs.log_probs(run, state, rollout.sample_groups(run, state, 0)[1]))
    return batches
