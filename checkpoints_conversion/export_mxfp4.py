"""Pack the routed experts of a Hugging Face folder into MXFP4, for serving.

    python -m checkpoints_conversion.export_mxfp4 FOLDER OUT [--layout compressed-tensors|gpt-oss] [--rule even]

    compressed-tensors   what SGLang, vLLM and transformers load for most families
    gpt-oss              its tensors, for engines that read an architecture's experts in this layout

Trained with fake-quantized experts, a model loses nothing if the rule is that of training. See
megatron_mopd/quantization/packed_folder.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_mopd.cli import guarded
from megatron_mopd.quantization.packed_folder import export_packed


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--layout", default="compressed-tensors")
    parser.add_argument("--rule", default="even", help="of the scales: floor, even or rceil")
    arguments = parser.parse_args(words)
    print(export_packed(arguments.folder, arguments.out, arguments.layout, arguments.rule))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
