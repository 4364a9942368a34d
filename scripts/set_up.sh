# Sourced by quickstart.sh and test.sh: a virtual environment with this project in it, made once.
#   set_up         the project
#   set_up dev     the project with an extra of pyproject.toml
# Uses the active virtual environment, or makes .venv here. What was installed is stamped with a hash of
# pyproject.toml, so that a second run installs nothing. PYTHON=... names another Python (3.11 or newer).

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed; install it, or name it with PYTHON=..." >&2
    return 1
}

enter_environment() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        PATH="$VIRTUAL_ENV/bin:$PATH"
        return
    fi
    # pip is asked for too: an interrupted "python -m venv" leaves a folder that has none
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        local python
        python=$(find_python) || return 1
        echo "Making a virtual environment in .venv ($("$python" --version))"
        if ! "$python" -m venv --clear .venv; then
            rm -rf .venv
            echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
            return 1
        fi
    fi
    VIRTUAL_ENV="$PWD/.venv"
    PATH="$VIRTUAL_ENV/bin:$PATH"
    export VIRTUAL_ENV PATH
    unset PYTHONHOME
}

set_up() {
    local extra="${1:-}" key stamp
    enter_environment || return 1
    key=$( (cat pyproject.toml; pwd; python --version) | sha256sum | cut -c1-16)
    stamp="$VIRTUAL_ENV/.vlretrieval-$key"
    if [ -e "$stamp-$extra" ]; then
        return
    fi
    echo "Installing into $VIRTUAL_ENV (once)"
    python -m pip install --disable-pip-version-check --quiet -e ".${extra:+[$extra]}" || return 1
    # An environment may have held a torch of another origin already, beside which torchvision cannot be imported.
    if ! python -c 'import torch, torchvision' 2>/dev/null; then
        echo "error: torch and torchvision in $VIRTUAL_ENV do not fit each other; run this in a fresh environment" >&2
        return 1
    fi
    rm -f "$VIRTUAL_ENV"/.vlretrieval-*  # stamps of an older pyproject.toml
    touch "$stamp-" "$stamp-$extra"
}
