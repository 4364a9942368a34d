"""TensorBoard as the second logger beside metrics.csv."""

from __future__ import annotations

from lightning.pytorch.loggers import Logger, TensorBoardLogger


def tensorboard(save_dir: str, id: str) -> Logger:
    """Lightning's TensorBoard logger in ``save_dir``/tensorboard. A run is its folder there: ``id`` is not needed."""
    try:
        return TensorBoardLogger(save_dir, name="tensorboard", version="", default_hp_metric=False)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("no tensorboard here; pip install 'vlretrieval[tensorboard]'") from error
