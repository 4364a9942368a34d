"""An index of pictures on disk: built, kept up to date and searched; ``opened.py`` is what a program uses."""
