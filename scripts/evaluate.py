"""``python scripts/evaluate.py key=value ...``: the same as ``vlretrieval-evaluate``."""

from vlretrieval.commands.evaluate import main

if __name__ == "__main__":
    main()
