"""vlretrieval: image-text retrieval with self-attention and cross-modal heads.

Importing the package is cheap: torch is met only when something is built or loaded.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlretrieval.deploy.index.opened import Index
    from vlretrieval.deploy.loaded import LoadedModel

__version__ = "0.1.0"
__all__ = ["Index", "__version__", "load_model"]


def load_model(folder: str | PathLike[str], trust: bool = False) -> LoadedModel:
    """Open an exported folder (``vlretrieval-export``); all that is needed lies in it.

    Args:
        trust: also open torch programs (format=torch), reading which can run code that lies in them.

    Raises:
        ValueError: the folder is not an export, or a file in it is missing or damaged.
    """
    from vlretrieval.deploy.loaded import load_folder

    return load_folder(folder, trust)


def __getattr__(name: str) -> type[Index]:
    # torch is imported with it
    if name == "Index":
        from vlretrieval.deploy.index.opened import Index

        return Index
    raise AttributeError(f"module 'vlretrieval' has no attribute {name!r}")
