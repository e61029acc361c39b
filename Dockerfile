# For NVIDIA GPUs. This project's tests do not build it, since they have no container builder: expect to adjust the base
# image. Choose one whose torch is the version that vLLM pins. pip then keeps the image's torch, and with it the image's
# builds of Transformer Engine and Apex; otherwise the last step fails the build.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

WORKDIR /opt/rlhf_mc
COPY setup.py pyproject.toml ./
COPY rlhf_mc rlhf_mc
RUN pip install --no-cache-dir -e ".[gpu,dev]"

COPY . .
RUN python -c "import torch, megatron.core, transformer_engine.pytorch, apex, vllm; assert torch.version.cuda"

ENTRYPOINT ["launch/torchrun_1node.sh"]
