"""Gzip and zstd files, known by content, unpacked as far as they are whole."""

from __future__ import annotations

import gzip
import mmap
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PACKED_ENDINGS = {".gz": "gzip", ".zst": "zstd"}
SKIPPABLE = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a zstd frame that holds no data: some writers begin with one (RFC 8878, 3.1.2)."""
ZSTD_WINDOW = 1 << 31  # bytes: what --ultra --long=31 needs
COPY_BYTES = 1 << 22


def packing_of(head: bytes) -> str | None:
    """`gzip` or `zstd` by the first bytes of a file, None for neither."""
    if head[1:4] == SKIPPABLE and head[0] >> 4 == 5:
        return "zstd"
    return next((name for mark, name in PACKINGS.items() if head.startswith(mark)), None)


def unpack(path: Path, packing: str, folder: Path) -> tuple[Path, str | None]:
    """(plain copy, what is wrong): a packed stream cannot be read from its middle."""
    plain, problem = folder / f"{path.name}.plain", None
    with path.open("rb") as raw, plain.open("wb") as target:
        try:
            shutil.copyfileobj(_unpacking(raw, packing), target, COPY_BYTES)
        except EOFError:
            problem = f"damaged {packing}: truncated, the end of the stream is missing"
        except (gzip.BadGzipFile, zlib.error, OSError, ValueError) as error:
            problem = f"damaged {packing}: {error}"
    if problem:  # the last line is cut anywhere: it is the damage, not a row
        with plain.open("rb+") as target:
            if plain.stat().st_size:
                with mmap.mmap(target.fileno(), 0) as content:
                    whole = content.rfind(b"\n") + 1
                target.truncate(whole)
    return plain, problem


def _unpacking(raw: IO[bytes], packing: str) -> IO[bytes]:
    if packing == "gzip":
        return _EagerGzip(fileobj=raw)  # type: ignore[return-value]
    import zstandard

    return _CheckedZstd(raw, zstandard)  # type: ignore[return-value]


class _EagerGzip(gzip.GzipFile):
    """Small reads: what stands before the damage is handed out before the damage is met."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read1(1 << 16)


class _CheckedZstd:
    """zstandard's own reader ends silently where the stream is cut off."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self.raw, self.error = raw, zstandard.ZstdError
        self.new = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj
        self.frame, self.rest = self.new(), b""

    def read(self, size: int = -1) -> bytes:
        while True:
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, self.new()
            block = self.rest or self.raw.read(1 << 16)
            self.rest = b""
            if not block:
                if self.started:
                    raise EOFError
                return b""
            self.started = True
            try:
                text = bytes(self.frame.decompress(block))
            except self.error as error:
                raise ValueError(str(error)) from None
            if self.frame.eof:
                self.started = False
            if text:
                return text

    started = False
