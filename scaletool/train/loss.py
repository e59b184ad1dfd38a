"""The loss, defined once: the mean over the real target tokens of the global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from scaletool.train.data.batches import IGNORED_LABEL


def loss_share(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """This micro-batch's share of the step's loss: summed cross-entropy / target tokens of the global batch.

    Shares add up, over micro-steps and ranks, to the loss of the step; a mean of means would weigh tokens of short
    batches more. The divisor is known from the order, so no communication is needed. T5's own loss is not used: it
    is a mean over the rank's tokens, which Trainer 5.x then multiplies by processes x accumulation.
    """
    outputs = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=batch["decoder_input_ids"],
    )
    logits = outputs.logits
    total = functional.cross_entropy(
        logits.view(-1, logits.shape[-1]).float(), batch["labels"].view(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return total / batch["info"].micro.step_target_tokens
