"""One small file a command: compose, build, call, print. What the commands call lives in the other rooms."""
