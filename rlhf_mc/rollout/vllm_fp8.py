"""fp8 weights of vLLM's linear layers (rollout.quantization). A weight update writes them
unquantized; vLLM's own code then quantizes them into the memory that its kernels, and captured CUDA
graphs, read.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_TENSORS,
    materialize_layer,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers

from rlhf_mc.rollout.vllm_derived import loaded_parameters

METHOD = "fp8_per_channel"
"""vLLM's name: one scale for each output channel of a weight, and for each token of an input."""


class QuantizedLayers:
    """The linear layers of a model, in fp8. vLLM's own reload stages and quantizes layer by layer.
    Here the weights of all layers are staged together, since a weight update has its own order."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig) -> None:
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "quant_method", None), Fp8PtpcOnlineLinearMethod)
        }
        self._config = config
        self._is_staged = False

    def shapes(self, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the shapes that the model's parameters have while they are staged."""
        out = {name: tuple(param.shape) for name, param in loaded_parameters(model)}
        for prefix, layer in self._layers.items():
            unquantized, _ = get_layerwise_info(layer).restore_metadata
            for name in layer._parameters.keys() - SKIP_TENSORS:
                out.pop(f"{prefix}.{name}", None)
            out.update(
                {f"{prefix}.{name}": tuple(param.shape) for name, param in unquantized.items()}
            )
        return out

    def stage(self) -> None:
        """Give the layers unquantized parameters, of arbitrary values, until `quantize`."""
        if self._is_staged:
            return
        for layer in self._layers.values():
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            restore_layer_on_meta(layer, info)
            materialize_layer(layer, info)
        self._is_staged = True

    def quantize(self) -> None:
        """Quantize the staged parameters into the parameters that `stage` has replaced, and free
        the staged ones. Do nothing if nothing is staged. Collective over the engine's ranks: a
        scale is computed from the whole weight."""
        if not self._is_staged:
            return
        with torch.no_grad(), set_current_vllm_config(self._config):
            for layer in self._layers.values():
                _layerwise_process(layer, get_layerwise_info(layer))
        self._is_staged = False
