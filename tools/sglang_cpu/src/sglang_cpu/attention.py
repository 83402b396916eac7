"""Multi-head latent attention (DeepSeek, Kimi) with the torch_native backend."""

# pyright: reportMissingImports=false


def register() -> None:
    """Prefill on the absorbed path, as decode does.

    `AttentionBackendRegistry.get_handler` has no entry for torch_native and falls back to triton's, which prefills
    without absorption: keys of every head, which torch_native then looks for in the latent pool and fails on the shape.
    The absorbed path computes the same attention on the latent itself; SGLang takes it too where it must be
    deterministic.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
