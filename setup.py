"""Packaging: what `pip install megatron_mopd` and its extras bring.

Ranges only. The versions that the CPU quickstart and the tests are measured with are pinned in constraints/cpu.txt.
"""

import platform
from pathlib import Path

from setuptools import Extension, find_packages, setup

EXTRAS = {
    # Sampling and scoring inside the driver, without a server: transformers' models, not only its tokenizers.
    "embedded": ["transformers>=5.24,<6"],
    # Servers for rollout and teachers on this machine's GPUs. Without one: tools/setup_sglang_cpu.sh.
    "sglang": ["sglang>=0.5.23,<0.6"],
    # Transformer Engine layers. NVIDIA's apex is not on PyPI: the package of that name there is something else.
    "gpu": ["transformer-engine[pytorch]>=2.9"],
    "wandb": ["wandb>=0.20", "tensorboard>=2.16"],
    # Demonstrations in parquet files.
    "parquet": ["pyarrow>=15"],
    # pyright runs on node, which its extra brings from PyPI.
    "dev": [
        *("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.14", "pyright[nodejs]", "pre-commit>=4"),
        "openai>=2.8,<4",  # the client that the tests of the gateway play with
        "compressed-tensors>=0.20",  # what tests compare quantized bytes with; torchao as well, see Makefile
    ],
}

COMPILED = ("mcore/exponentials.c", "quantization/mxfp4.c")
FLAGS = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]


def extension(source: str) -> Extension:
    """Loaded with ctypes. Without a C compiler torch's operations do the same: see the modules named as the sources."""
    folder, name = source.removesuffix(".c").split("/")
    return Extension(
        f"megatron_mopd.{folder}._{name}",
        sources=[f"megatron_mopd/{source}"],
        extra_compile_args=FLAGS + ["-mprefer-vector-width=512"] * (platform.machine() == "x86_64"),
        optional=True,
    )


setup(
    name="megatron_mopd",
    version="0.1.0",
    description="Multi-teacher on-policy distillation on Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"": "."},  # makes an editable install one line in a .pth file: examples and tools import too
    packages=find_packages(include=["megatron_mopd*", "checkpoints_conversion*"]),
    package_data={"megatron_mopd.prompts": ["xtml.jinja"]},
    ext_modules=[extension(source) for source in COMPILED],
    install_requires=[
        "torch>=2.8",
        "megatron-core>=0.16.1,<0.20",
        "psutil",  # torch's and Megatron's checkpoint writers plan memory with it; without it saving hangs
        "numpy>=1.26",
        "safetensors>=0.5",
        "transformers>=4.57,<6",  # tokenizers and chat templates
        "jinja2>=3.1",
        "pydantic>=2.7",
        "pyyaml>=6",
        "rich>=13",
        "aiohttp>=3.10",  # one client for thousands of requests to SGLang servers
        "orjson>=3.10",  # log-probs of long trajectories: the parser decides the throughput
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mopd = megatron_mopd.cli:main"]},
)
