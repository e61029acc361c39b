"""Writes a Megatron-Core checkpoint (of convert_hf_to_mcore.py) as a Hugging Face checkpoint.

python tools/convert_mcore_to_hf.py --checkpoint DIR --output DIR [--max-shard-gb 5]

One process holds the whole model, on the CPU. Under torchrun each holds its part, and one file of weights:

torchrun --nproc-per-node 8 tools/convert_mcore_to_hf.py --checkpoint DIR --output DIR --tensor-model-parallel-size 8
"""

from __future__ import annotations

import argparse
import sys

from rlhf_mc.checkpoint.convert import Spread, mcore_to_hf
from rlhf_mc.observability.failures import exit_code


def main() -> int:
    """Parses the arguments; a mistake of the user's is one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="directory of the Megatron-Core checkpoint")
    parser.add_argument("--output", required=True, help="directory of the Hugging Face checkpoint to write")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file of weights, in 10^9 bytes")
    Spread.add_arguments(parser)
    args = parser.parse_args()
    limit = int(args.max_shard_gb * 1e9)
    return exit_code("convert_mcore_to_hf", lambda: mcore_to_hf(args.checkpoint, args.output, Spread.of(args), limit))


if __name__ == "__main__":
    sys.exit(main())
