"""Convert a Hugging Face checkpoint to a Megatron-Core checkpoint, which can be read in any (tp,
pp) layout.

python tools/convert_hf_to_mcore.py --hf-path DIR --output DIR

One process holds the whole model, on the CPU. Under torchrun each rank holds its shard:

torchrun --nproc-per-node 8 tools/convert_hf_to_mcore.py --hf-path DIR --output DIR \\
    --tensor-model-parallel-size 8
"""

from __future__ import annotations

import sys

from rlhf_mc.runtime.tool import Parser, end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.checkpoint.convert import add_layout_options, hf_to_mcore, layout_sizes, run_conversion


def main() -> int:
    """Convert as the arguments say. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--hf-path", required=True, help="directory with config.json and safetensors weights"
    )
    parser.add_argument(
        "--output", required=True, help="directory of the Megatron-Core checkpoint to write"
    )
    add_layout_options(parser)
    args = parser.parse_args()
    return run_conversion(
        "convert_hf_to_mcore", lambda: hf_to_mcore(args.hf_path, args.output, layout_sizes(args))
    )


if __name__ == "__main__":  # the checkpoint writer starts processes that import this file
    sys.exit(main())
