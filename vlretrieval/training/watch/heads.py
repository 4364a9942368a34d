"""Says during training when heads of a layer are near copies of each other: the sign of a bad start."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback

from vlretrieval.evaluation.inputs import Inputs
from vlretrieval.heads.diversity import Copies, diversity, warnings
from vlretrieval.training.gather import world
from vlretrieval.training.sharding import Sharded

log = logging.getLogger(__name__)


class WatchHeads(Callback):
    """Measures how alike the heads are at the end of every n-th epoch, and warns with advice; ends no run.

    Rank 0 does it alone. Sharded weights (trainer=fsdp2) cannot be looked at by one rank, and are not watched.

    Args:
        inputs: pairs as the model is shown them.
        every_n_epochs: how often.
        pairs: how many, from the first.
        maps, outputs: from which likeness on, see :class:`vlretrieval.heads.diversity.Copies`.
    """

    def __init__(self, inputs: Inputs, every_n_epochs: int, pairs: int = 64, maps: float = 0.02, outputs: float = 0.95):
        if every_n_epochs < 1 or pairs < 2:
            raise ValueError(f"heads_watch.every_n_epochs={every_n_epochs}, pairs={pairs}: at least 1, and 2 pairs")
        self.inputs, self.every_n_epochs, self.pairs = inputs, every_n_epochs, pairs
        self.copies = Copies(maps, outputs)
        self._told: set[str] = set()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs or world()[0] or isinstance(trainer.strategy, Sharded):
            return
        for line in self.look(module.model):  # type: ignore[arg-type]
            layer = line.partition(":")[0]
            if layer not in self._told:  # once a layer: the next epochs would say the same
                self._told.add(layer)
                log.warning("epoch %d: %s", epoch, line)

    def look(self, model: pl.LightningModule) -> list[str]:
        """A line for each layer with near copies."""
        offsets = self.inputs.split.captions_of_image
        captions = offsets[:-1][np.diff(offsets) > 0][: self.pairs]
        return warnings(diversity(model, self.inputs, captions).values(), self.copies)
