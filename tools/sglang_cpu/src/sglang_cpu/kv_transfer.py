"""Copies between the KV pool and its host tier (HiCache) for multi-head attention, which SGLang does with CUDA kernels
(`pool_host/mha.py`: jit_transfer_hicache, transfer_kv). Here they are assignments between two tensors in memory.

Layouts layer_first and page_first. Pools of latent attention keep SGLang's own code, which raises here.
"""

# pyright: reportMissingImports=false

import torch


def register() -> None:
    from sglang.srt.mem_cache.pool_host import mha

    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = backup_from_device_all_layer
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = load_to_device_per_layer

    # `l2_transfer.py` waits on streams and times copies with events; torch's CPU stand-ins lack these two methods. A
    # copy on the CPU is done when the call returns, so there is nothing to wait for.
    torch.cpu.Stream.synchronize = lambda self: None  # pyright: ignore[reportAttributeAccessIssue]
    torch.cpu.Event.elapsed_time = lambda self, end: 0.0  # pyright: ignore[reportAttributeAccessIssue]


def _host_rows(pool, layer):
    """Keys and values of one layer on the host, a row per token."""
    if pool.layout == "layer_first":
        return pool.k_buffer[layer], pool.v_buffer[layer]
    if pool.layout == "page_first":
        return pool.k_buffer[:, layer], pool.v_buffer[:, layer]
    raise NotImplementedError(f"--hicache-mem-layout {pool.layout} on CPU; use layer_first or page_first")


def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.layer_num):
        keys, values = _host_rows(self, layer)
        keys[host_indices] = self.device_k_buffers[layer][device_indices]
        values[host_indices] = self.device_v_buffers[layer][device_indices]


def load_to_device_per_layer(
    self,
    device_pool,
    host_indices,
    device_indices,
    layer_id,
    io_backend,
    *,
    is_draft=False,
):
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    keys, values = _host_rows(self, layer_id)
    self.device_k_buffers[layer_id][device_indices] = keys[host_indices]
    self.device_v_buffers[layer_id][device_indices] = values[host_indices]
