"""A momentum copy of the encoders and a queue of what it saw: more negatives, softer targets (ALBEF, sec. 3.3)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlretrieval import losses
from vlretrieval.data.datasets import Batch
from vlretrieval.model.retrieval_model import RetrievalModel
from vlretrieval.training.frozen_features import image_of, text_of
from vlretrieval.training.gather import gather_rows


@dataclass(frozen=True)
class Momentum:
    """Settings of the momentum encoder.

    Args:
        decay: of the momentum weights, a step.
        queue: pairs remembered; any number, any batch size.
        soft_share: of the targets that is the momentum encoder's; it grows from 0 over the first ``ramp`` of the run.
        ramp: a share of the run.
    """

    decay: float = 0.995
    queue: int = 4096
    soft_share: float = 0.4
    ramp: float = 0.05

    def __post_init__(self) -> None:
        for name in ("decay", "soft_share", "ramp"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1)")
        if self.queue < 0:
            raise ValueError(f"queue={self.queue} is negative; 0 leaves the queue out")

    def share_at(self, progress: float) -> float:
        """``soft_share`` when ``progress`` (0 .. 1) of the run is done."""
        return self.soft_share * (min(1.0, progress / self.ramp) if self.ramp else 1.0)


@dataclass
class Teacher:
    """What the momentum encoder says of one step; B pairs of this rank, N in the gallery (all ranks', then the queue).

    Attributes:
        image, text: (B, E). gallery_image, gallery_text: (N, E). positives: (B, N) bool. soft_share: of the targets.
    """

    image: Tensor
    text: Tensor
    gallery_image: Tensor
    gallery_text: Tensor
    positives: Tensor
    soft_share: float


class MomentumEncoder(nn.Module):
    """The momentum weights, and a ring of the last pairs' embeddings and ids; all of it in every checkpoint."""

    image_queue: Tensor
    text_queue: Tensor
    image_ids: Tensor
    caption_ids: Tensor
    written: Tensor

    def __init__(self, model: RetrievalModel, settings: Momentum):
        super().__init__()
        self.settings = settings
        heads, model.crossmodal = model.crossmodal, None  # they have no part in the embeddings
        self.twin = copy.deepcopy(model).requires_grad_(False)
        model.crossmodal = heads
        size = settings.queue
        self.register_buffer("image_queue", torch.zeros(size, model.embed_dim))
        self.register_buffer("text_queue", torch.zeros(size, model.embed_dim))
        self.register_buffer("image_ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("caption_ids", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("written", torch.zeros((), dtype=torch.int64))  # pairs ever written; the ring's pointer
        self.eval()

    def train(self, mode: bool = True) -> MomentumEncoder:
        """Stays in evaluation mode: a teacher does not drop out."""
        return super().train(False)

    @torch.no_grad()
    def update(self, model: RetrievalModel) -> None:
        """Moves the momentum weights and statistics towards the model's."""
        own = dict(model.named_parameters())
        for name, weight in self.twin.named_parameters():
            weight.lerp_(own[name].detach(), 1 - self.settings.decay)
        statistics = dict(model.named_buffers())  # of batch norms: a teacher computes with them
        for name, value in self.twin.named_buffers():
            if value.is_floating_point():
                value.lerp_(statistics[name], 1 - self.settings.decay)
            else:
                value.copy_(statistics[name])

    @torch.no_grad()
    def teach(self, batch: Batch, progress: float = 1.0) -> Teacher:
        """Encodes this step's pairs; then remembers them, those of all ranks, for the steps to come."""
        image = image_of(self.twin, batch).embedding
        text = text_of(self.twin, batch).embedding
        rows = tuple(gather_rows(tensor) for tensor in (image, text, batch.image_ids, batch.caption_ids))
        filled = min(int(self.written), self.settings.queue)
        queues = (self.image_queue, self.text_queue, self.image_ids, self.caption_ids)
        images, texts, image_ids, caption_ids = (
            torch.cat([new, old[:filled]]) for new, old in zip(rows, queues, strict=True)
        )
        positives = losses.positive_pairs(batch.image_ids, batch.caption_ids, image_ids, caption_ids)
        self._remember(rows)
        return Teacher(image, text, images, texts, positives, self.settings.share_at(progress))

    def _remember(self, rows: tuple[Tensor, ...]) -> None:
        size = self.settings.queue
        finite = torch.isfinite(rows[0]).all(1) & torch.isfinite(rows[1]).all(1)
        rows = tuple(tensor[finite][-size:] if size else tensor[:0] for tensor in rows)
        places = (int(self.written) + torch.arange(len(rows[0]), device=self.written.device)) % max(1, size)
        queues: tuple[Any, ...] = (self.image_queue, self.text_queue, self.image_ids, self.caption_ids)
        for queue, new in zip(queues, rows, strict=True):
            queue[places] = new.to(queue.dtype)
        self.written += len(rows[0])
