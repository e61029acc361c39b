# For NVIDIA GPUs. NOT built by this project's tests, which have neither a container builder nor a GPU: expect to adjust
# the base image. Choose one whose torch is the version that vLLM pins, so that pip leaves the image's torch, and with
# it the image's builds of Transformer Engine and Apex, alone; the last step fails the build where that went wrong.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

WORKDIR /opt/rlhf_mc
COPY setup.py pyproject.toml ./
COPY rlhf_mc rlhf_mc
RUN pip install --no-cache-dir -e ".[gpu,dev]"

COPY . .
RUN python -c "import torch, megatron.core, transformer_engine.pytorch, apex, vllm; assert torch.version.cuda"

ENTRYPOINT ["launch/torchrun_1node.sh"]
