"""strategy megatron: Megatron-Core's DistributedDataParallel and its (distributed) optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.schema import MegatronConfig, OptimConfig
from rlhf_mc.models.expert_parts import CORRECTION_BIAS, ascending_in_buffer
from rlhf_mc.models.gpt_model import DTYPES, build_model, named_parameters
from rlhf_mc.models.megatron_patches import (
    fuse_adam,
    gather_parameters_once,
    gathering_objects_in,
    megatron_calls,
    parameters_in_order,
    remove_hooks,
)
from rlhf_mc.models.offload import gradient_buffers
from rlhf_mc.models.optimizer import OptimizerPart, optimizer_parts
from rlhf_mc.models.strategies.strategy import TrainingStrategy
from rlhf_mc.topology.groups import ProcessGroups


class MegatronStrategy(TrainingStrategy):
    """Whole parameters of the rank's split, and ZeRO-1 over their replicas."""

    has_weights = True

    def __init__(self, shape: ModelShape, megatron: MegatronConfig, groups: ProcessGroups) -> None:
        super().__init__(megatron, groups)
        self.chunks = [
            build_model(shape, megatron, groups, chunk)
            for chunk in range(groups.mesh.vpp if groups.is_member else 0)
        ]
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self._parameters: Mapping[str, Any] = named_parameters(self.chunks)

    def named_parameters(self) -> Mapping[str, Any]:
        return self._parameters

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: param.data for name, param in self._parameters.items()}

    def make_trainable(
        self, optim: OptimConfig, frozen: Collection[str], reduces_early: bool
    ) -> None:
        for name, param in self._parameters.items():
            param.requires_grad_(name not in frozen and not name.endswith(CORRECTION_BIAS))
        with megatron_calls():
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=reduces_early,
                use_distributed_optimizer=self.megatron.use_distributed_optimizer,
            )
            ddp: list[Any] = []
            for chunk in self.chunks:
                ordered = ascending_in_buffer(chunk.named_parameters())
                with parameters_in_order(chunk, ordered):
                    replicated = DistributedDataParallel(
                        chunk.config, ddp_config, chunk, pg_collection=self.groups.collection
                    )
                weakref.finalize(self, remove_hooks, replicated.grad_accs)
                ddp.append(replicated)
            self.trained = self.buffered = ddp
            dtype = DTYPES[self.megatron.dtype]
            config = OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.min_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=self.megatron.use_distributed_optimizer,
            )
            self.optimizer = ChainedOptimizer([])
            if self.groups.is_member:
                with gathering_objects_in(self.groups.collection.intra_dist_opt):
                    self.optimizer = get_megatron_optimizer(
                        config,
                        ddp,
                        config_overrides=get_standard_config_overrides(config),
                        use_gloo_process_groups=False,
                        pg_collection=self.groups.collection,
                    )
        gather_parameters_once(self.optimizer)
        fuse_adam(self.optimizer)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            chunk.config.finalize_model_grads_func = finalize_model_grads

    def zero_grad(self) -> None:
        for replicated in self.buffered:
            replicated.zero_grad_buffer()
        self.optimizer.zero_grad()

    def end_passes(self) -> None:
        pass

    def grad_norm(self) -> float:
        with megatron_calls():
            self.optimizer.prepare_grads()
            return float(self.optimizer.get_grad_norm())

    def step(self, clip_factor: float) -> None:
        """Do as Megatron-Core's optimizer.step after it has computed the norm."""
        with megatron_calls():
            for part in self.optimizer.chained_optimizers:
                grads = [param.grad for param in part.get_parameters() if param.grad is not None]
                if 0.0 < clip_factor < 1.0 and grads:
                    torch._foreach_mul_(grads, clip_factor)
            self.optimizer.step_with_ready_grads()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (name, param.main_grad)
            for name, param in self._parameters.items()
            if param.requires_grad
        )

    def gradient_bytes(self) -> int:
        return sum(grad.nbytes for grad in gradient_buffers(self.buffered))

    def optimizer_parts(self) -> list[OptimizerPart]:
        return optimizer_parts(self.optimizer, self._parameters)
