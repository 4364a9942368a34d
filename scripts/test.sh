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
# Two processes of one thread: the tests' tensors are tiny, and a file's tests stay together.
OMP_NUM_THREADS=1 python -m pytest -q -n "${TEST_PROCESSES:-2}" --dist loadfile --durations=10 "$@"
