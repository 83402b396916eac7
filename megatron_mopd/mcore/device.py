"""Where this process trains: the first GPU that torchrun gave it, or the CPU behind Megatron's CUDA calls.

Every module that imports megatron.core imports this one before it (`# isort: split` keeps the order), because the CPU
shim must be in place by then.
"""

import os
import warnings

import torch

from megatron_mopd.mcore import cpu

HAS_GPU = torch.cuda.is_available()
BACKEND = "nccl" if HAS_GPU else "gloo"
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if HAS_GPU else torch.device("cpu")

if not HAS_GPU:
    # Said when megatron.core is imported; local_layers.py replaces what they would be for.
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message="full scope is deprecated")  # upstream's default of cuda_graph_scope
    cpu.enable()
