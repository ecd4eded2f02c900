# Sourced by quickstart, test and check. Wants $root; leaves $python, the interpreter of an up-to-date .venv.
# A Python to begin with is looked for here; what the machine lacks and what to install is make_venv.py's business.

suits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

python=$root/.venv/bin/python
if ! suits "$python"; then
    python=
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if suits "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "Python 3.10, 3.11 or 3.12 is needed and ${PYTHON:-none} is not one. On Debian or Ubuntu:" >&2
        echo "    apt-get install python3 python3-venv python3-dev g++" >&2
        echo "Elsewhere: set PYTHON to one, as in PYTHON=/opt/python3.11/bin/python3 $0" >&2
        exit 1
    fi
fi
"$python" "$root/scripts/make_venv.py" || exit 1
python=$root/.venv/bin/python
