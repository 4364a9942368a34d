"""``python scripts/export.py key=value ...``: the same as ``vlretrieval-export``."""

from vlretrieval.commands.export import main

if __name__ == "__main__":
    main()
