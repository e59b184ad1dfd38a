"""The loss, defined once: the sum over the real target tokens of the global batch, divided by their number.

Every token weighs the same, whatever the padding, packing, accumulation, world size or mode.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 1 << 26
"""Most logits that exist at a time (256 MiB in float32); beyond, they are computed in chunks, and again in backward."""

INPUTS = ("input_ids", "decoder_input_ids", "labels", "label_places")
MASKS = ("attention_mask", "source_segments", "target_segments")


def loss_share(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """This micro-batch's share of the step's loss: summed cross-entropy / target tokens of the global batch.

    Shares add up, over micro-steps and ranks, to the loss of the step; a mean of means would weigh tokens of short
    batches more. The divisor is known from the order, or summed over ranks for a stream. T5's own loss is not used:
    it is a mean over the rank's tokens, which Trainer 5.x then multiplies by processes x accumulation.
    """
    return loss_sum(model, batch) / batch["step_target_tokens"]


def loss_sum(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Summed cross-entropy of a micro-batch; `model` was prepared by `compute_loss_in_forward`, and maybe wrapped."""
    total: torch.Tensor = model(**{name: batch[name] for name in (*INPUTS, *MASKS) if name in batch})
    return total


def compute_loss_in_forward(model: Any) -> None:
    """Let the model's forward take a batch and return its summed loss.

    The whole computation has to be one forward of the wrapped model, since DDP, FSDP and ZeRO act at its borders; and
    T5's own forward knows one mask for the encoder and the cross attention, where packed rows need two.
    """
    model.forward = types.MethodType(_forward, model)


def _forward(
    self: Any,
    input_ids: torch.Tensor,
    decoder_input_ids: torch.Tensor,
    labels: torch.Tensor,
    label_places: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    source_segments: torch.Tensor | None = None,
    target_segments: torch.Tensor | None = None,
) -> torch.Tensor:
    embedded = self.get_input_embeddings()(input_ids)
    encoder_mask: Any = attention_mask
    decoder_mask: Any = None
    cross_mask: Any = attention_mask
    if source_segments is not None and target_segments is not None:
        # In the dtype of the activations, as T5 makes its own masks.
        encoder_mask, decoder_mask, cross_mask = packed_masks(source_segments, target_segments, embedded.dtype)
    encoded = self.get_encoder()(inputs_embeds=embedded, attention_mask=encoder_mask)[0]
    decoded = self.get_decoder()(
        input_ids=decoder_input_ids,
        attention_mask=decoder_mask,
        encoder_hidden_states=encoded,
        encoder_attention_mask=cross_mask,
        use_cache=False,
    )[0]
    # Only places with a label need logits; which they are was counted on the host, so nothing waits for the device.
    hidden = decoded.reshape(-1, decoded.shape[-1]).index_select(0, label_places)
    if getattr(self.config, "scale_decoder_outputs", self.config.tie_word_embeddings):
        hidden = hidden * self.model_dim**-0.5
    wanted = labels.reshape(-1).index_select(0, label_places)
    rows = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
    if len(wanted) <= rows:
        return _cross_entropy(self.lm_head, hidden, wanted)
    parts = zip(hidden.split(rows), wanted.split(rows), strict=True)
    return torch.stack(
        [checkpoint(_cross_entropy, self.lm_head, *part, use_reentrant=False) for part in parts]  # type: ignore[misc]
    ).sum()


def _cross_entropy(lm_head: torch.nn.Module, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(lm_head(hidden).float(), wanted, reduction="sum")


def packed_masks(
    source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Additive masks (rows, 1, queries, keys) of encoder, decoder and cross attention; segments are (rows, slots).

    A token sees the tokens of its own segment, in the decoder only those before it. Padding sees padding, so that no
    query is left without a key. Dense float masks with lengths in multiples of 8 are what the memory-efficient kernel
    of sm_70 takes.
    """
    length = target.shape[1]
    encoder = source[:, :, None] == source[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
    decoder = (target[:, :, None] == target[:, None, :]) & causal
    cross = (target[:, :, None] == source[:, None, :]) | (target[:, :, None] == 0)
    return _additive(encoder, dtype), _additive(decoder, dtype), _additive(cross, dtype)


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Half of the lowest number: a position bias on top of it cannot overflow to -inf.
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min / 2)[:, None]
