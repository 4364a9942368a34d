"""The LightningModule: encodes a batch, gathers over ranks, calls the objective, logs. No arithmetic of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from vlretrieval import losses
from vlretrieval.data.datasets import Batch
from vlretrieval.model.encoded import Encoded
from vlretrieval.model.retrieval_model import MAX_LOGIT_SCALE, RetrievalModel
from vlretrieval.training.averaging import WeightAverage
from vlretrieval.training.chunks import recomputed
from vlretrieval.training.draws import uniform_rows
from vlretrieval.training.freezing import freeze_parts
from vlretrieval.training.frozen_features import image_of, negatives_of, text_of
from vlretrieval.training.gather import gather_encoded, gather_rows, over_ranks, world
from vlretrieval.training.length_buckets import encode_text
from vlretrieval.training.metrics_file import written
from vlretrieval.training.momentum import MomentumEncoder
from vlretrieval.training.objective import Objective
from vlretrieval.training.pairs import Pairs
from vlretrieval.training.sharding import clip_gradients, shard


class RetrievalTask(pl.LightningModule):
    """Trains a :class:`RetrievalModel`.

    Args:
        model: what is trained.
        objective: gives the loss of one step's pairs.
        optimizer: ``model -> Optimizer``.
        scheduler: ``(optimizer, total_steps=) -> LRScheduler``, stepped once an optimizer step; None keeps the rate.
        seed: with the step (and, for dropout, the rank) it decides every draw, so that a resumed run repeats them.
        ema_decay: of an average of the weights that is evaluated and saved as the model; None: the weights themselves.
        freeze: parts of the model (name prefixes or patterns) that are not trained, and stay in evaluation mode.
    """

    def __init__(
        self,
        model: RetrievalModel,
        objective: Objective,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., Any] | None = None,
        *,
        seed: int = 0,
        ema_decay: float | None = None,
        freeze: Sequence[str] = (),
    ):
        super().__init__()
        objective.check(model)
        self._frozen = freeze_parts(model, freeze)
        self.model, self.objective, self.seed = model, objective, seed
        self.average = None if ema_decay is None else WeightAverage(model, ema_decay)
        self.momentum = None if objective.momentum is None else MomentumEncoder(model, objective.momentum)
        self._optimizer, self._scheduler = optimizer, scheduler
        self._sharded = False
        self._total_steps = 1
        # of the last step, to be looked at: image embeddings, text embeddings, losses by name
        self.latest: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None
        self._batches = 0  # begun so far; Lightning's own batch_idx is one behind after a resume in mid-epoch

    def on_fit_start(self) -> None:
        """Every part in training mode but the frozen ones; Lightning would keep the mode its library left it in."""
        self.train()

    def configure_model(self) -> None:
        """Shards the weights where the strategy gives a mesh of devices (trainer=fsdp2)."""
        if self.device_mesh is None or self._sharded:
            return
        self._sharded = True
        mesh = self.device_mesh["data_parallel"]
        shard(self.model, mesh)
        if self.momentum is not None:
            shard(self.momentum.twin, mesh)
        if self.average is not None:
            self.average = WeightAverage(self.model, self.average.decay)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not self._sharded:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_gradients(parameters, float(gradient_clip_val), gradient_clip_algorithm or "norm")

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.model)
        self._total_steps = total_steps(self.trainer)
        if self._scheduler is None:
            return optimizer
        scheduler = self._scheduler(optimizer, total_steps=self._total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train(self, mode: bool = True) -> RetrievalTask:
        """As any module's, but frozen parts stay in evaluation mode."""
        super().train(mode)
        for part in self._frozen:
            part.eval()
        return self

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # re-seeded each step: no generator's state needs saving, and ranks differ (seed_everything gives all the same)
        torch.manual_seed(_mix(self.seed, self._batches, world()[0]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pairs = self.encode(batch)
        self._batches += 1
        loss, parts = self.objective(self.model, pairs, self.progress)
        self.latest = pairs.image.embedding.detach(), pairs.text.embedding.detach(), parts
        if written(self.trainer):
            for name, value in over_ranks({**parts, "loss": loss.detach()}).items():
                shown = name not in ("matching_accuracy", "loss")
                self.log(f"train/{name}", value, prog_bar=shown, batch_size=len(pairs.image))
            self.log("train/logit_scale", self.model.logit_scale.detach(), batch_size=len(pairs.image))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.after_step()

    def after_step(self) -> None:
        """What follows an optimizer step: the scale within its bounds, the averages moved."""
        with torch.no_grad():
            self.model.log_logit_scale.clamp_(0.0, math.log(MAX_LOGIT_SCALE))
        if self.average is not None:
            self.average.update(self.model)
        if self.momentum is not None:
            self.momentum.update(self.model)

    def encode(self, batch: Batch) -> Pairs:
        """The batch as the objective takes it: encoded here, gathered over ranks, positives known."""
        if batch.pixels is None:
            image = image_of(self.model, batch)
        else:
            image = recomputed(self.model.encode_image, self.objective.chunk, batch.pixels, model=self.model)
        text, negatives, negative_valid = self._encode_texts(batch)
        image_ids, caption_ids = gather_rows(batch.image_ids), gather_rows(batch.caption_ids)
        matching = self.objective.matches(self.model, self.progress)
        local, everyone = len(batch.image_ids), len(image_ids)
        rows = range(world()[0] * local, (world()[0] + 1) * local)
        return Pairs(
            image,
            text,
            gather_encoded(image, tokens=matching),
            gather_encoded(text, tokens=matching),
            losses.positive_pairs(batch.image_ids, batch.caption_ids, image_ids, caption_ids),
            uniform_rows(_mix(self.seed, self._batches, -1), rows, everyone, image.embedding.device),
            negatives,
            negative_valid,
            None if self.momentum is None else self.momentum.teach(batch, self.progress),
        )

    def _encode_texts(self, batch: Batch) -> tuple[Encoded, Encoded | None, Tensor | None]:
        """Captions, and the data's hard negatives of the pairs that are matched, in one pass of the encoder.

        Also which of the latter there are: (pairs matched, K) bool.
        """
        own = batch.token_ids

        def encode(token_ids: Tensor, token_mask: Tensor) -> Encoded:
            return encode_text(self.model, token_ids, token_mask, self.objective.length_buckets)

        unused = not self.objective.matches(self.model, self.progress)
        if batch.text is not None:
            matched = 0 if unused else self.objective.matched(len(own))
            buckets = self.objective.length_buckets
            return text_of(self.model, batch, buckets), *negatives_of(self.model, batch.negatives, matched, buckets)
        if batch.negative_token_ids is None or batch.negative_token_mask is None or unused:
            return recomputed(encode, self.objective.chunk, own, batch.token_mask, model=self.model), None, None
        matched = self.objective.matched(len(own))
        wrong, wrong_mask = batch.negative_token_ids[:matched], batch.negative_token_mask[:matched]
        length = max(own.shape[1], wrong.shape[2])
        ids = torch.cat([F.pad(t, (0, length - t.shape[1])) for t in (own, wrong.flatten(0, 1))])
        mask = torch.cat([F.pad(m, (0, length - m.shape[1])) for m in (batch.token_mask, wrong_mask.flatten(0, 1))])
        encoded = recomputed(encode, self.objective.chunk, ids, mask, model=self.model)
        return encoded.part(slice(0, len(own))), encoded.part(slice(len(own), None)), wrong_mask.any(-1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self._batches
        if self.average is not None:  # whoever opens the checkpoint finds the average as the model's weights
            own = self.average.exchange(checkpoint["state_dict"], "model.")
            checkpoint["training_weights"] = {"weights": own, "steps": self.average.steps}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._batches = checkpoint["batches"]
        own = checkpoint.get("training_weights")
        if (own is None) != (self.average is None):
            was, now = ("off", "on") if own is None else ("on", "off")
            raise ValueError(f"the average of the weights (ema_decay) was {was} in the checkpoint and is {now} now")
        if self.average is not None and own is not None:
            self.average.restore(checkpoint["state_dict"], "model.", own["weights"], own["steps"])

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; 1 outside a run."""
        return self._total_steps

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 .. 1; 1 outside a run."""
        if self._trainer is None:
            return 1.0
        return self.trainer.global_step / max(1, self._total_steps)


def total_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole run.

    Not ``trainer.estimated_stepping_batches``: asked for while optimizers are made, it sets the loaders up before the
    checkpoint's place in them is known, and a run resumed in mid-epoch would start the epoch anew.
    """
    batches = len(trainer.datamodule.train_dataloader())  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * (trainer.max_epochs or 0)
    bounds = [n for n in (steps, trainer.max_steps) if n and n > 0]
    if not bounds:
        raise ValueError("the run has no end; set trainer.max_epochs or trainer.max_steps")
    return min(bounds)


def _mix(*numbers: int) -> int:
    """One 63-bit seed of several numbers (a linear congruential step each)."""
    state = 0
    for number in numbers:
        state = (state * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return state
