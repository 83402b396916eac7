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

_NOT_FOR_USERS = (  # what Megatron-Core and torch say about how Megatron-Core calls torch
    "full scope is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
    "Please use DTensor instead",
    "`load_state_dict` is deprecated",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of experts, which is meant
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
)
_NOT_FOR_CPUS = (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "When using sequence parallelism it is recommended",
)

for message in (*_NOT_FOR_USERS, *(() if HAS_GPU else _NOT_FOR_CPUS)):
    warnings.filterwarnings("ignore", message=message)
if not HAS_GPU:
    cpu.enable()
