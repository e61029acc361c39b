"""Writes a Megatron-Core checkpoint (of convert_hf_to_mcore.py) as a Hugging Face checkpoint.

python tools/convert_mcore_to_hf.py --checkpoint DIR --output DIR
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path


def convert(checkpoint: str, output: str) -> None:
    """One process, the whole model on the CPU, in the checkpoint's own type."""
    from rlhf_mc.checkpoint.hf import export_hf, read_config
    from rlhf_mc.checkpoint.save_load import HF_ASSETS, checkpoint_dtype, load_mcore
    from rlhf_mc.config.schema import MegatronConfig
    from rlhf_mc.models.build import build_model
    from rlhf_mc.reshard.families import ModelShape
    from rlhf_mc.reshard.placement import training_layouts
    from rlhf_mc.topology.groups import single_process

    dtype = checkpoint_dtype(checkpoint)
    assets = Path(checkpoint) / HF_ASSETS
    shape = ModelShape.from_hf_config(read_config(assets))
    with single_process() as groups:
        model = build_model(shape, MegatronConfig(dtype=dtype), groups)
        load_mcore(model, checkpoint)
        params = {name: param.data for name, param in model.named_parameters()}
        layouts = training_layouts(shape, groups.mesh)
        export_hf(params, layouts, shape, output, 0, None, dtype, assets)
    print(f"{checkpoint} -> {output}: {sum(p.numel() for p in params.values()):,} parameters")


def main() -> int:
    """Parses the arguments; a mistake of the user's is one line and exit code 2."""
    from rlhf_mc.config.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="directory of the Megatron-Core checkpoint")
    parser.add_argument("--output", required=True, help="directory of the Hugging Face checkpoint to write")
    args = parser.parse_args()
    # Libraries' advice about what they lack is not for the user.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        convert(args.checkpoint, args.output)
    except UserError as error:
        print(f"convert_mcore_to_hf: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
