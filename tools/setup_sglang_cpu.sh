#!/usr/bin/env bash
# SGLang on a machine without a GPU, in an environment of its own: tools/setup_sglang_cpu.sh [VENV]
#
# VENV is .venv-sglang by default. Takes about four minutes and 3 GB once; a later call sees that nothing has changed and
# takes a moment. Safe to interrupt: the next call goes on.
#
#   PYTHON=python3.12   another interpreter (3.11 is what the versions were measured with)
#   TORCH_INDEX=URL     where to look for a CPU-only torch first
#
# With a GPU none of this is needed: pip install -e '.[sglang]'
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-sglang}
python=${PYTHON:-python3.11}
constraints=$root/constraints/sglang-cpu.txt
plugin=$root/tools/sglang_cpu

fail() {
    echo "setup_sglang_cpu: $*" >&2
    exit 2
}

[ $# -le 1 ] || fail "usage: tools/setup_sglang_cpu.sh [VENV]"
[ "$(uname -sm)" = "Linux x86_64" ] || fail "SGLang's CPU set-up is for Linux x86_64, this is $(uname -sm); use servers by URL (sglang.student.urls)"
"$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$python is absent, older than 3.11 or lacks the venv module; install Python 3.11 (Debian: python3.11-venv), or name another with PYTHON=..."
mkdir -p "$venv" 2>/dev/null || fail "$venv cannot be made; name another folder: tools/setup_sglang_cpu.sh VENV"

exec 9>"$venv/.setup.lock"
flock 9 # a second call waits, and then finds it done

# What decides the content of the environment. The plugin is installed editable: its path counts, its modules need not.
wanted=$({
    "$python" --version
    echo "$plugin"
    cat "${BASH_SOURCE[0]}" "$constraints" "$plugin/pyproject.toml" "$plugin/torchvision_schemas.py"
} | sha256sum)
stamp=$venv/.installed
[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || exit 0
rm -f "$stamp"

echo "installing SGLang for CPU into $venv (about four minutes, once)"
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then # absent, or interrupted half-way
    "$python" -m venv --clear "$venv" || fail "$python -m venv $venv failed; is there space left?"
fi
pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-warn-conflicts -c "$constraints" \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@" ||
        fail "pip could not install $*; its message is above. The same command goes on from here"
}
pip_install setuptools
pip_install --no-build-isolation -e "$plugin"
pip_install --no-deps sglang torchvision triton
"$venv/bin/python" "$plugin/torchvision_schemas.py"

# The whole server imports, and its modules are compiled now and not in each start.
unset PYTHONDONTWRITEBYTECODE
export SGLANG_USE_CPU_ENGINE=1
server="sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry"
"$venv/bin/python" -W ignore -c "import $server" >"$venv/.check.log" 2>&1 ||
    fail "SGLang does not import: $(tail -n 1 "$venv/.check.log") (see $venv/.check.log)"
echo "$wanted" >"$stamp"
