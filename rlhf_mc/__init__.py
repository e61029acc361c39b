"""PPO for language models on Megatron-Core, with in-process vLLM and no Ray."""

__version__ = "0.1.0"
