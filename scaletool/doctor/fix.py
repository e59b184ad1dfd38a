"""`scaletool doctor --fix`: what can be corrected mechanically, as copies beside the files. Comments stay."""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletool.doctor.documents import Document
from scaletool.doctor.registry import Edit, Finding
from scaletool.errors import ConfigError


@dataclass(frozen=True)
class Correction:
    """A corrected copy. target: where it goes. text: what it holds."""

    document: Document
    target: Path
    text: str

    def diff(self) -> str:
        """What changes, as a unified diff."""
        before, after = self.document.text.splitlines(keepends=True), self.text.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.document.path, str(self.target)))


def corrections(documents: Sequence[Document], findings: Sequence[Finding]) -> list[Correction]:
    """A copy for every file of which a finding can be corrected."""
    found = []
    for document in documents:
        edits = [edit for finding in findings if finding.file == document.path for edit in finding.edits]
        if edits and document.data:
            path = Path(document.path)
            target = path.with_name(f"{path.stem}.fixed{path.suffix}")
            found.append(Correction(document, target, corrected(document.text, edits)))
    return found


def write(corrections: Iterable[Correction]) -> None:
    """Raises ConfigError where a copy of another content is there already: nothing is overwritten."""
    for each in corrections:
        if each.target.exists() and each.target.read_text(encoding="utf-8", errors="replace") != each.text:
            raise ConfigError(f"{each.target} exists and differs", hint="move it away, then run --fix again")
    for each in corrections:
        each.target.write_text(each.text, encoding="utf-8")


def corrected(text: str, edits: Iterable[Edit]) -> str:
    """The text of a YAML or JSON file with the edits made."""
    if text.lstrip()[:1] == "{":
        data = json.loads(text)
        _apply(data, edits)
        indent = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
        return json.dumps(data, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 20
    data = yaml.load(text)
    # Quoted: YAML 1.1, which accelerate reads, takes a plain `no` for a boolean.
    quoted = [
        edit._replace(value=DoubleQuotedScalarString(edit.value))
        if edit.action == "set" and isinstance(edit.value, str)
        else edit
        for edit in edits
    ]
    _apply(data, quoted)
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def _apply(data: Any, edits: Iterable[Edit]) -> None:
    for edit in edits:
        *path, last = edit.key.split(".")
        block = data
        for part in path:
            if part not in block and edit.action == "set":
                block[part] = {}
            block = block.get(part) if isinstance(block, dict) else None
        if not isinstance(block, dict):
            continue  # another edit took the block away
        if edit.action == "set":
            block[last] = edit.value
        elif edit.action == "delete":
            block.pop(last, None)
        elif last in block and edit.value not in block:
            _rename(block, last, edit.value)


def _rename(block: dict[str, Any], old: str, new: str) -> None:
    """In its place where the mapping can (a round-trip mapping keeps comments by key position)."""
    place = list(block).index(old)
    value = block.pop(old)
    if hasattr(block, "insert"):
        block.insert(place, new, value)
    else:
        later = {key: block.pop(key) for key in list(block)[place:]}
        block[new] = value
        block.update(later)
