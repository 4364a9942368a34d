"""``python scripts/train.py key=value ...``, ``torchrun scripts/train.py ...``: the same as ``vlretrieval-train``."""

from vlretrieval.commands.train import main

if __name__ == "__main__":
    main()
