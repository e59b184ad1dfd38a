"""model/ in Hugging Face format, from any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_model(accelerator: Any, wrapped: Any, tokenizer: Any, folder: Path) -> None:
    """Gather the weights (a collective call under sharded engines: every rank) and write them on the main process."""
    state = accelerator.get_state_dict(wrapped)
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(wrapped)
        model.config.use_cache = True  # switched off for training only
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()
