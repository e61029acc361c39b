# For NVIDIA GPUs of the A100, H100 and B200 generations, on a driver for CUDA 13 (580 or later):
#
#   docker build -t rlhf_mc .
#   docker run --gpus all --ipc host --entrypoint python rlhf_mc -m rlhf_mc --check
#   docker run --gpus all --ipc host -v /data:/data rlhf_mc /data/CONFIG.yaml
#
# Without Apex: docker build --build-arg APEX=0. A build of Apex that failed is tried again with --no-cache-filter apex.
#
# What fits what, and what of this file was built where: docs/internals/gpu_readings.md, "Versions".

# Apex compiles with the minor version of CUDA alone that torch was built with. The compiler stays in the image: Triton,
# FlashInfer and TileLang compile kernels while they run.
ARG BASE=nvidia/cuda:13.0.3-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE} AS python
# The libraries are what NCCL needs for InfiniBand. Their versions follow the base image's distribution.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        git python3 python3-dev python3-venv ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# All that PyPI has as wheels, as locked.
FROM python AS locked
COPY requirements/gpu.txt /opt/requirements/
RUN grep -v '^transformer-engine-torch==' /opt/requirements/gpu.txt >/opt/requirements/wheels.txt \
    && pip install --no-cache-dir --no-deps --only-binary :all: -r /opt/requirements/wheels.txt

# Transformer Engine's kernels are in its wheel, for sm_80, sm_90 and sm_100 among others; what is compiled of it is its
# interface to torch. The layer changes with requirements/ alone, as does Apex's.
FROM locked AS transformer-engine
ARG MAX_JOBS=8
# The headers of the cuDNN and NCCL that torch loads; the base image has no cuDNN.
ARG SITE=/opt/venv/lib/python3.12/site-packages/nvidia
RUN export MAX_JOBS CPLUS_INCLUDE_PATH="$SITE/cudnn/include:$SITE/nccl/include" NVTE_PYTORCH_FORCE_BUILD=TRUE \
    && grep '^transformer-engine-torch==' /opt/requirements/gpu.txt >/opt/requirements/compiled.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheels -r /opt/requirements/compiled.txt

# All but Apex. Wheels are copied and not mounted: buildah 1.28 neither waits for the stage of a mount nor looks at
# its content when it looks for a layer in its cache.
FROM locked AS complete
COPY --from=transformer-engine /opt/wheels /opt/wheels
RUN pip install --no-cache-dir --no-deps /opt/wheels/*.whl
WORKDIR /opt/rlhf_mc
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && python -c "import transformer_engine.pytorch, megatron.core.models.gpt.gpt_layer_specs, vllm"
ENTRYPOINT ["launch/torchrun_1node.sh"]

# Based on the stage above for one reason: the two are then compiled one after the other, with MAX_JOBS each.
FROM transformer-engine AS apex
COPY requirements/apex.txt requirements/apex.sh /opt/requirements/
ARG MAX_JOBS=8
ARG APEX=1
RUN export MAX_JOBS APEX TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
    && /opt/requirements/apex.sh build /opt/apex

# Where Apex could not be built, the last lines of the build name the reason, and so does --check.
FROM complete
COPY --from=apex /opt/apex /opt/apex
RUN requirements/apex.sh install /opt/apex
