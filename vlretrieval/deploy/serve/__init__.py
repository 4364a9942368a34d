"""An index over HTTP, with a page to search it; ``app.py`` is the application, ``page/`` what a browser gets."""
