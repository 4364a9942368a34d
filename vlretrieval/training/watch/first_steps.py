"""A look at the first steps of every run, for what :mod:`sanity` can find in them. Changes no bit of the run.

Everything is read from what the steps computed anyway: gradients, the last embeddings, weights, the clock.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from vlretrieval.training.gather import world
from vlretrieval.training.task import RetrievalTask
from vlretrieval.training.watch import sanity
from vlretrieval.training.watch.check import has_chance
from vlretrieval.training.watch.pace import Pace

log = logging.getLogger(__name__)

EARLY = 20  # steps after which heads, embeddings and the loader are looked at
LATE = (100, 1000)  # and the loss, after a tenth of the run within these bounds: warmup comes first


class FirstSteps(Callback):
    """Says once a session what looks wrong in its first steps, and at each epoch's end if the logit scale is at a rail.

    Gradients are looked at in the first step, and in the first that trains the cross-modal heads.

    Args:
        pace: knows how long steps waited for their batches.
    """

    def __init__(self, pace: Pace):
        self.pace = pace
        self._steps = 0
        self._late = 0
        self._unreached = {"encoders", "heads"}
        self._at_rail = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, RetrievalTask)
        self._late = min(max(module.total_steps // 10, LATE[0]), LATE[1])

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        assert isinstance(module, RetrievalTask)
        matching = module.objective.matches(module.model, module.progress)
        looked = {"encoders"} | ({"heads"} if matching or module.model.crossmodal is None else set())
        if not self._unreached & looked:
            return
        self._unreached -= looked
        self._say(trainer, "the first step", [sanity.gradients(module.model, () if matching else ("crossmodal",))])

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._steps += 1
        if self._steps > self._late and self._steps > EARLY:
            return
        assert isinstance(module, RetrievalTask)
        if self._steps == EARLY:
            found = [sanity.copied_heads(module.model), sanity.loader_bound(*self.pace.waited())]
            self._say(trainer, f"{EARLY} steps", found)
        if self._steps == self._late:
            self._say(trainer, f"{self._late} steps", self._learning(module))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, RetrievalTask)
        found = sanity.rail(float(sanity.whole(module.model.logit_scale)))
        if not found.good and not self._at_rail and trainer.is_global_zero:
            log.warning("epoch %d: %s", trainer.current_epoch + 1, found)
        self._at_rail = not found.good

    def _learning(self, module: RetrievalTask) -> list[sanity.Finding]:
        assert module.latest is not None
        image, text, losses = module.latest
        found = [sanity.rail(float(sanity.whole(module.model.logit_scale)))]
        if "contrastive" in losses and has_chance(module.objective):
            found.append(sanity.chance(float(losses["contrastive"]), len(image) * world()[1]))
        return [*found, sanity.collapse(image, "image"), sanity.collapse(text, "text")]

    def _say(self, trainer: pl.Trainer, when: str, found: list[sanity.Finding]) -> None:
        if not trainer.is_global_zero:
            return
        good = [finding.seen for finding in found if finding.good]
        if good:
            log.info("sanity after %s: ok: %s", when, "; ".join(good))
        for finding in found:
            if not finding.good:
                log.warning("sanity after %s: %s", when, finding)
