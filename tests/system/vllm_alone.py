"""vLLM without rlhf_mc: the greedy responses of a Hugging Face checkpoint. Started by
test_real_model.py.

python vllm_alone.py MODEL_DIR PROMPTS.json LONGEST      # prints one JSON list of texts
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    directory, prompts, longest = sys.argv[1:]
    model = LLM(directory, dtype="float32", enforce_eager=True, max_model_len=256)
    parameters = SamplingParams(temperature=0.0, max_tokens=int(longest))
    rows = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(Path(prompts).read_text())]
    outputs = model.generate(rows, parameters, use_tqdm=False)
    print(json.dumps([output.outputs[0].text for output in outputs]))


if __name__ == "__main__":
    main()
