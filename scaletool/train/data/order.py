"""The global order: which units make up the global batch of a step. It knows no ranks.

A unit is a row, a packed row, or a group of like rows. For a dataset, seed, epoch and global batch size the sequence
of global batches is the same for every world size, profile and mode. No permutation of all units exists anywhere:
blocks of neighbours are permuted, then windows of that order are shuffled, so the batch of any step is found in a time
and memory that do not grow with the data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_BLOCKS = 1 << 18  # data of up to this many units is permuted one by one
WINDOW_UNITS = 1 << 17  # shuffled together
POOL_BATCHES = 64  # global batches whose units are sorted by length together: enough to find equals, still random


@dataclass
class GlobalOrder:
    """Units in the order of training.

    lengths: shape (num_units,), tokens of each, used to put like with like; None keeps random order.
    block_units: neighbours that stay in one window, None for as few as MOST_BLOCKS allows. window_units: how many
    units are shuffled together. shuffle: False keeps the source order (validation).
    """

    num_units: int
    global_batch_size: int
    seed: int = 0
    lengths: Any = None
    shuffle: bool = True
    block_units: int | None = None
    window_units: int = WINDOW_UNITS
    _blocks: tuple[int, np.ndarray, int] | None = field(default=None, repr=False)
    _cached: tuple[int, int, np.ndarray] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.block = self.block_units or -(-self.num_units // MOST_BLOCKS)
        self.window_batches = max(1, self.window_units // self.global_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_units // self.global_batch_size)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch), both from 0, of a step counted from 0 over the whole run."""
        return divmod(step, self.steps_per_epoch)

    def global_batch(self, step: int) -> np.ndarray:
        """Unit numbers of a step; fewer than the global batch size only in the last step of an epoch."""
        epoch, index = self.locate(step)
        window, place = divmod(index, self.window_batches)
        if self._cached is None or self._cached[:2] != (epoch, window):
            self._cached = (epoch, window, self._window(epoch, window))
        return self._cached[2][place * self.global_batch_size : (place + 1) * self.global_batch_size]

    def _window(self, epoch: int, window: int) -> np.ndarray:
        """The units of one window in training order."""
        size = self.window_batches * self.global_batch_size
        positions = np.arange(window * size, min((window + 1) * size, self.num_units))
        if not self.shuffle:
            return positions
        units = self._permuted(epoch, positions)
        random = np.random.default_rng([self.seed, epoch, window])
        random.shuffle(units)
        if self.lengths is None:
            return units
        pool = POOL_BATCHES * self.global_batch_size
        lengths = np.asarray(self.lengths[units])
        for start in range(0, len(units), pool):
            by_length = np.argsort(lengths[start : start + pool], kind="stable")
            units[start : start + pool] = units[start : start + pool][by_length]
        return self._shuffle_batches(units, random)

    def _permuted(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Blocks change places, and all of it is turned by a random offset, so that the short last block is not
        always the same units."""
        if self._blocks is None or self._blocks[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            blocks = np.arange(-(-self.num_units // self.block), dtype=np.int32)
            whole = self.num_units // self.block
            random.shuffle(blocks[:whole])
            self._blocks = (epoch, blocks, int(random.integers(self.num_units)))
        _, blocks, offset = self._blocks
        units: np.ndarray = blocks[positions // self.block].astype(np.int64)
        units *= self.block
        units += positions % self.block
        units += offset
        units %= self.num_units
        return units

    def _shuffle_batches(self, units: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Sorted pools would train short to long; whole batches change places, the incomplete one stays last."""
        whole = len(units) // self.global_batch_size
        split = whole * self.global_batch_size
        batches = units[:split].reshape(whole, self.global_batch_size)
        return np.concatenate([batches[random.permutation(whole)].ravel(), units[split:]])
