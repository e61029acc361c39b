"""Writes a Hugging Face checkpoint as a Megatron-Core checkpoint, readable in any (tp, pp) layout.

python tools/convert_hf_to_mcore.py --hf-path DIR --output DIR
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings


def convert(hf_path: str, output: str) -> None:
    """One process, the whole model on the CPU, in the checkpoint's own type."""
    from rlhf_mc.checkpoint.hf import HFReader, import_hf
    from rlhf_mc.config.schema import MegatronConfig
    from rlhf_mc.reshard.families import ModelShape
    from rlhf_mc.reshard.placement import training_layouts

    reader = HFReader(hf_path)
    shape = ModelShape.from_hf_config(reader.config)
    reader.check(shape)

    # Megatron-Core takes many seconds to import: only for an input that is right.
    from rlhf_mc.checkpoint.save_load import save_mcore
    from rlhf_mc.models.build import build_model
    from rlhf_mc.topology.groups import single_process

    with single_process() as groups:
        model = build_model(shape, MegatronConfig(dtype=reader.dtype_name()), groups)
        params = {name: param.data for name, param in model.named_parameters()}
        import_hf(reader, training_layouts(shape, groups.mesh)[0], params)
        save_mcore(model, output, hf_path)
    print(f"{hf_path} -> {output}: {sum(p.numel() for p in params.values()):,} parameters")


def main() -> int:
    """Parses the arguments; a mistake of the user's is one line and exit code 2."""
    from rlhf_mc.config.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-path", required=True, help="directory with config.json and safetensors weights")
    parser.add_argument("--output", required=True, help="directory of the Megatron-Core checkpoint to write")
    args = parser.parse_args()
    # Libraries' advice about what they lack is not for the user.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        convert(args.hf_path, args.output)
    except UserError as error:
        print(f"convert_hf_to_mcore: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":  # the checkpoint writer starts processes that import this file
    sys.exit(main())
