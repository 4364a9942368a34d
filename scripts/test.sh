#!/usr/bin/env bash
# Style, types and tests. Does all the set-up itself; needs Python 3.11 or newer.
#   bash scripts/test.sh                 everything but the slow tests
#   bash scripts/test.sh -m slow         the slow ones; further words go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/set_up.sh
set_up dev
ruff check .
mypy
python -m pytest -q --durations=10 "$@"
