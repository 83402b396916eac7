"""Stand-in for SGLang's kernel package, which PyPI has for CUDA only.

SGLang imports names from it at the top of modules that a CPU server loads too (`sglang/srt/layers`), and then takes its
own torch code on CPUs without AMX. So every name imports, and promises nothing: to call one raises.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):  # asked by the import system, which takes an absent attribute for what it is
        raise AttributeError(name)

    def kernel(*_arguments: object, **_options: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU version here")

    return kernel
