"""The key-value cache of a wave, in the form in which transformers' models read and write caches.

All rows share their columns: a decoding step writes one column of every row in place, where transformers' own dynamic
cache copies the whole past. Unwritten columns are zero, since a masked NaN would still poison a weighted sum.

Shape suffixes: B rows, H heads, C columns, D head width, Q columns of one forward pass.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

_SPARE_COLUMNS = 32


class ColumnCache(Cache):
    """Set the window with `aim`, run the model with `cache=` this, repeat."""

    def __init__(self, num_rows: int, num_layers: int):
        self._layers = [_Layer(num_rows) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))

    def aim(self, rows: slice, first: int, column: int) -> None:
        """The next forward pass is that of `rows`; it writes at `column` and attends to columns from `first` on."""
        for layer in self._layers:
            layer.rows, layer.first, layer.column = rows, first, column

    def keep(self, rows_B: Tensor) -> None:
        for layer in self._layers:
            layer.keep(rows_B)

    def grow(self, rows: int, columns: int) -> None:
        """By empty rows behind the others, and by empty columns before all others."""
        for layer in self._layers:
            layer.grow(rows, columns)


class _Layer(CacheLayerMixin):
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, num_rows: int):
        super().__init__()
        self._num_rows = num_rows
        self.rows, self.first, self.column = slice(None), 0, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._zeros(key_states, 0)
        self.values = self._zeros(value_states, 0)
        self.is_initialized = True

    def _zeros(self, like_BHQD: Tensor, num_columns: int) -> Tensor:
        _, heads, _, width = like_BHQD.shape
        return like_BHQD.new_zeros(self._num_rows, heads, num_columns, width)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] keys and values at the window; return those of all columns that the pass attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.column + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys, self.values = self._longer(self.keys, end), self._longer(self.values, end)
        self.keys[self.rows, :, self.column : end] = key_states
        self.values[self.rows, :, self.column : end] = value_states
        return self.keys[self.rows, :, self.first : end], self.values[self.rows, :, self.first : end]

    def _longer(self, old_BHCD: Tensor, needed: int) -> Tensor:
        """Doubling, so that a long response copies its past a few times only."""
        columns = old_BHCD.shape[2]
        new_BHCD = self._zeros(old_BHCD, max(needed + _SPARE_COLUMNS, 2 * columns))
        new_BHCD[:, :, :columns] = old_BHCD
        return new_BHCD

    def keep(self, rows_B: Tensor) -> None:
        self._num_rows = len(rows_B)
        self.keys, self.values = self.keys[rows_B], self.values[rows_B]

    def grow(self, rows: int, columns: int) -> None:
        self._num_rows += rows
        more = (0, 0, columns, 0, 0, 0, 0, rows)  # from the last dimension to the first
        self.keys, self.values = functional.pad(self.keys, more), functional.pad(self.values, more)

    def get_seq_length(self) -> int:
        return self.column - self.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
