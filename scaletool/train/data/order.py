"""The global order: which rows make up the global batch of a step. It knows no ranks.

For a dataset, seed, epoch and global batch size the sequence of global batches is the same for
every world size, profile and mode, and the batch of any step is found without walking there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

WINDOW_BATCHES = 64  # global batches whose rows are sorted by length together: wide enough to find equals, still random


@dataclass
class GlobalOrder:
    """Rows in the order of training.

    lengths: shape (num_rows,), tokens of source and target, used to put like with like; None keeps random order.
    shuffle: False keeps the source order (validation).
    """

    num_rows: int
    global_batch_size: int
    seed: int = 0
    lengths: np.ndarray | None = None
    shuffle: bool = True
    _cached: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.global_batch_size)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch), both from 0, of a step counted from 0 over the whole run."""
        return divmod(step, self.steps_per_epoch)

    def global_batch(self, step: int) -> np.ndarray:
        """Row indices of a step; shorter than the global batch size only in the last step of an epoch."""
        epoch, index = self.locate(step)
        return self._epoch(epoch)[index * self.global_batch_size : (index + 1) * self.global_batch_size]

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._arrange(epoch))
        return self._cached[1]

    def _arrange(self, epoch: int) -> np.ndarray:
        rows = np.arange(self.num_rows)
        if not self.shuffle:
            return rows
        random = np.random.default_rng([self.seed, epoch])
        random.shuffle(rows)
        if self.lengths is None:
            return rows
        window = WINDOW_BATCHES * self.global_batch_size
        for start in range(0, self.num_rows, window):
            part = rows[start : start + window]
            part[:] = part[np.argsort(self.lengths[part], kind="stable")]
        return self._shuffle_batches(rows, random)

    def _shuffle_batches(self, rows: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Sorted windows would train short to long; whole batches change places, the incomplete one stays last."""
        whole = self.num_rows // self.global_batch_size
        split = whole * self.global_batch_size
        batches = rows[:split].reshape(whole, self.global_batch_size)
        return np.concatenate([batches[random.permutation(whole)].ravel(), rows[split:]])
