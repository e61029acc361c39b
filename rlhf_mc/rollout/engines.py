"""The rollout engines that rollout.name selects. Neither torch nor an engine is imported here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mc.architectures.run_shapes import router_replay
from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config, RolloutConfig
from rlhf_mc.rollout.base import EngineFactory, RolloutEngine
from rlhf_mc.rollout.vllm_layout import check_vllm, vllm_layout
from rlhf_mc.runtime.user_function import describe_error, load_attribute

if TYPE_CHECKING:
    import torch


class VLLM:
    """vLLM, as rollout/base.py describes an EngineFactory. Its engine is imported by name where a
    run is built, since it imports torch and vLLM."""

    title = "vLLM"
    layout = staticmethod(vllm_layout)
    check_layout = staticmethod(check_vllm)

    def check_installation(self) -> None:
        """Import vLLM. Raise UserError if it is missing, of another version or for another
        device."""
        importlib.import_module("rlhf_mc.rollout.vllm_engine").check_build()

    def check_model(self, shape: ModelShape, cfg: RolloutConfig) -> None:
        """Raise UserError where vLLM cannot shard the model so, or has no kernel for it on this
        machine."""
        check_vllm(shape, cfg.tensor_model_parallel_size)
        importlib.import_module("rlhf_mc.rollout.vllm_limits").check_kernels(shape, cfg)

    def build(
        self,
        cfg: Config,
        shape: ModelShape,
        groups: Sequence[Sequence[int]],
        rank: int,
        storage: Mapping[str, torch.Tensor],
    ) -> RolloutEngine:
        """Return this rank's part of the engines over these groups. Every rank must call it."""
        engine: RolloutEngine = importlib.import_module("rlhf_mc.rollout.vllm_engine").VLLMEngine(
            **_arguments(cfg, shape),
            groups=groups,
            rank=rank,
            storage=storage,
            return_experts=router_replay(cfg, shape) == "rollout",
        )
        return engine


class SGLang:
    """SGLang, as rollout/base.py describes an EngineFactory. Its parameters have vLLM's names and
    shards."""

    title = "SGLang"
    layout = staticmethod(vllm_layout)
    families = ("llama", "qwen2", "qwen3", "mistral")
    """Families whose models tests compare with vLLM's."""

    def check_layout(self, shape: ModelShape, tp_size: int) -> None:
        """Raise UserError if SGLang does not generate with the family, or cannot shard the model
        so."""
        if shape.family not in self.families:
            raise UserError(
                f"rollout.name is sglang, and the model is of the family {shape.family}; "
                f"sglang is for {', '.join(self.families)}: use vllm"
            )
        check_vllm(shape, tp_size)

    def check_installation(self) -> None:
        """Import SGLang. Raise UserError if it is missing or of another version."""
        importlib.import_module("rlhf_mc.rollout.sglang_engine")

    def check_model(self, shape: ModelShape, cfg: RolloutConfig) -> None:
        """Raise UserError where the engine does not have the model or a setting."""
        self.check_layout(shape, cfg.tensor_model_parallel_size)
        if cfg.quantization is not None:
            raise UserError(
                f"rollout.quantization is {cfg.quantization!r}; rollout.name sglang has none: set "
                "it to null"
            )

    def build(
        self,
        cfg: Config,
        shape: ModelShape,
        groups: Sequence[Sequence[int]],
        rank: int,
        storage: Mapping[str, torch.Tensor],
    ) -> RolloutEngine:
        """Return this rank's part of the engines over these groups. Every rank must call it."""
        module = importlib.import_module("rlhf_mc.rollout.sglang_engine")
        engine: RolloutEngine = module.SGLangEngine(
            **_arguments(cfg, shape), groups=groups, rank=rank, storage=storage
        )
        return engine


def _arguments(cfg: Config, shape: ModelShape) -> dict[str, Any]:
    return {
        "model_path": cfg.model.path,
        "shape": shape,
        "cfg": cfg.rollout,
        "max_model_len": cfg.data.max_prompt_length + cfg.data.max_response_length,
        "dtype": cfg.actor.megatron.dtype,
        "seed": cfg.trainer.seed,
    }


ENGINES: dict[str, EngineFactory] = {"vllm": VLLM(), "sglang": SGLang()}
"""Built-in engines by the value of rollout.name."""


def engine_factory(cfg: RolloutConfig) -> EngineFactory:
    """Return the factory of the run's rollout engine. Raise UserError if the user's cannot be
    loaded, or lacks a part of EngineFactory."""
    if cfg.name != "custom":
        return ENGINES[cfg.name]
    assert cfg.custom_engine.path is not None, "config/checks.py ensures it"
    return _custom_engine(cfg.custom_engine.path)


@functools.cache
def _custom_engine(path: str) -> EngineFactory:
    section = "rollout.custom_engine"
    where = f"{section}.path {path}: Engine"
    try:
        factory: EngineFactory = load_attribute(section, path, "Engine")()
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{where}() raised {describe_error(error)}") from error
    wanted = ("title", "layout", "check_layout", "check_installation", "check_model", "build")
    if missing := [part for part in wanted if not hasattr(factory, part)]:
        raise UserError(f"{where} lacks {', '.join(missing)} of rlhf_mc.rollout.base.EngineFactory")
    return factory
