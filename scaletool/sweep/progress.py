"""Progress of a sweep on stderr: a live line on a terminal, one plain line per cell elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from scaletool.sweep.matrix import Cell
from scaletool.sweep.stats import rates


class Progress:
    """Counts launches and tells how long the rest will take, from the mean of those made in this call."""

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self.total, self.finished, self.launched = total, 0, 0
        self.seconds, self.started = 0.0, 0.0
        self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def begin(self, cell: Cell, number: int) -> None:
        self.started = time.monotonic()
        self.bar.update(self.task, description=f"round {number}  {cell.name}  {self._eta()}")

    def done(self, cell: Cell, number: int, record: dict[str, Any]) -> None:
        self.finished += 1
        if self.started:
            self.seconds += time.monotonic() - self.started
            self.launched += 1
            took = f"{time.monotonic() - self.started:5.1f} s"
        else:
            took = "kept"
        self.started = 0.0
        ok = record["outcome"] == "ok"
        result = f"{rates(record)['samples_per_second']:.1f} samples/s" if ok else str(record["reason"]).splitlines()[0]
        line = (
            f"[{self.finished}/{self.total}] round {number}  {cell.name:32} {took:>8}  {record['outcome']:8} {result}"
        )
        self.console.print(f"{line}  {self._eta()}", markup=False, soft_wrap=True)
        self.bar.update(self.task, completed=self.finished)

    def _eta(self) -> str:
        left = self.total - self.finished
        if not self.launched or not left:
            return ""
        return f"about {left * self.seconds / self.launched / 60:.1f} min left"
