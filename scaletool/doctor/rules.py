from __future__ import annotations


def refuse_errors(loaded): ...
