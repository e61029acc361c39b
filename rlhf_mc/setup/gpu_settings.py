"""Settings for GPUs in a run on a CPU: they are ignored with a line, so that a config for GPUs can
be tried there."""

from __future__ import annotations

from rlhf_mc import platform
from rlhf_mc.config.load import load_config, to_dict
from rlhf_mc.config.schema import Config, MegatronConfig, RolloutConfig, get_setting, layouts
from rlhf_mc.runtime.console import print_line

_ON_CPU = {
    "rollout.free_cache_engine": False,
    "rollout.offload_cuda_graphs": RolloutConfig.offload_cuda_graphs,
    "rollout.gpu_memory_utilization": RolloutConfig.gpu_memory_utilization,
    "rollout.enforce_eager": RolloutConfig.enforce_eager,
}
"""Key -> its value on a CPU. The KV cache there is rollout.cpu_kvcache_space_gb; fp8 is computed in
megatron.dtype."""


def for_this_device(cfg: Config) -> Config:
    """Return the config with which a run computes on this device: on a CPU without the settings for
    GPUs, which rank 0 lists in one line."""
    if platform.use_cuda():
        return cfg
    values = _ON_CPU | {f"{role}.megatron.fp8": MegatronConfig.fp8 for role in layouts(cfg)}
    ignored = {key: value for key, value in values.items() if get_setting(cfg, key) != value}
    if not ignored:
        return cfg
    print_line(
        f"on a CPU these settings are ignored, which are for GPUs: {', '.join(ignored)}",
        rank_0_only=True,
    )
    overrides = [
        f"{key}={'null' if value is None else str(value).lower()}" for key, value in ignored.items()
    ]
    return load_config(to_dict(cfg), overrides)
