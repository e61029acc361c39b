"""Convert a Megatron-Core checkpoint (of convert_hf_to_mcore.py), or a model of a run's training
checkpoint, to a Hugging Face checkpoint.

python tools/convert_mcore_to_hf.py --checkpoint DIR --output DIR [--max-shard-gb 5]
python tools/convert_mcore_to_hf.py --checkpoint RUN/global_step_N --output DIR [--role
actor|critic] [--hf-path DIR]

A training checkpoint of any layout is converted one file of weights at a time; the result is the
run's own export of that step. Without --hf-path, config.json and tokenizer come from the paths in
the run's settings. A critic becomes a sequence classifier of one label.

A Megatron-Core checkpoint is converted by one process, which holds the whole model on the CPU.
Under torchrun each rank holds its shard, and one file of weights:

torchrun --nproc-per-node 8 tools/convert_mcore_to_hf.py --checkpoint DIR --output DIR \\
    --tensor-model-parallel-size 8
"""

from __future__ import annotations

import argparse
import sys

from rlhf_mc.runtime.tool import Parser, end_on_interrupt, finite_number

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.checkpoint.convert import (
    add_layout_options,
    is_training_checkpoint,
    layout_sizes,
    mcore_to_hf,
    run_conversion,
    training_checkpoint_to_hf,
)
from rlhf_mc.config.errors import UserError


def main() -> int:
    """Convert as the arguments say. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="directory of the checkpoint, Megatron-Core's or a run's",
    )
    parser.add_argument(
        "--output", required=True, help="directory of the Hugging Face checkpoint to write"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=finite_number(1e-6, "10^9 bytes of at least 1e-6"),
        default=5.0,
        help="largest file of weights, in 10^9 bytes",
    )
    parser.add_argument(
        "--role",
        choices=("actor", "critic"),
        help="training checkpoint: the model to convert; default: actor",
    )
    parser.add_argument(
        "--hf-path", help="training checkpoint: directory of the model that the role started from"
    )
    add_layout_options(parser)
    args = parser.parse_args()
    return run_conversion("convert_mcore_to_hf", lambda: convert(args))


def convert(args: argparse.Namespace) -> None:
    """Convert a checkpoint of either kind."""
    limit = int(args.max_shard_gb * 1e9)
    if is_training_checkpoint(args.checkpoint):
        training_checkpoint_to_hf(
            args.checkpoint, args.output, args.role or "actor", args.hf_path, limit
        )
    elif args.role or args.hf_path:
        raise UserError(
            f"--role and --hf-path are for a run's global_step_N; {args.checkpoint} is not one"
        )
    else:
        mcore_to_hf(args.checkpoint, args.output, layout_sizes(args), limit)


if __name__ == "__main__":
    sys.exit(main())
