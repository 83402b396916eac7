"""Plugin on SGLang's entry point `sglang.srt.plugins`: replaces what calls CUDA in SGLang 0.5.23 on a CPU.

SGLang calls `register` in the server and in each scheduler before it builds anything. Control logic and numerics stay
SGLang's own; what is replaced moves bytes or pins memory, and one choice between two of its own attention paths.
"""

import os


def register() -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return  # the same environment may serve a GPU
    from sglang_cpu import attention, host_memory, kv_transfer

    attention.register()
    host_memory.register()
    kv_transfer.register()
