"""Unpack MXFP4 experts into a Hugging Face folder of bfloat16 or float32 weights with the same values.

    python -m checkpoints_conversion.import_mxfp4 FOLDER OUT

FOLDER has the layout compressed-tensors (mxfp4-pack-quantized) or gpt-oss. See
megatron_mopd/quantization/packed_folder.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_mopd.cli import guarded
from megatron_mopd.quantization.packed_folder import import_packed


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    arguments = parser.parse_args(words)
    print(import_packed(arguments.folder, arguments.out))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
