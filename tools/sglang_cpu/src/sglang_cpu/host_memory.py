"""Host buffers: those of returned routed experts (`state_capturer/base.py`) and of the host tier of the KV cache."""

# pyright: reportMissingImports=false

HOST_MEMORY_RESERVE_BYTES = 512 << 20


def register() -> None:
    from sglang.srt.mem_cache.pool_host import base, common, mha

    # `alloc_with_host_register` pins through cudart, which a CPU build of torch does not have. Device and host are the
    # same memory here: there is nothing to pin.
    common._cuda_host_register = lambda buffer, registration_granularity_bytes=None: None

    # A host pool is refused where less than 10 GiB stay free beside it: more than a small machine has.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_MEMORY_RESERVE_BYTES

    # Reads from storage bounce through one pinned page.
    dummy_page = mha.MHATokenToKVPoolHost.get_dummy_flat_data_page

    def get_dummy_flat_data_page(self):
        self.pin_memory = False
        return dummy_page(self)

    mha.MHATokenToKVPoolHost.get_dummy_flat_data_page = get_dummy_flat_data_page
