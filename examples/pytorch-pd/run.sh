#!/bin/sh
# Runs pair.py with its arguments, in a virtual environment under .build that it makes
# first. `make demo-pytorch` builds bin/tierd and calls it.
#
# PYTHON=/path/to/python takes that one instead, which must have torch, grpcio, protobuf
# and PyYAML, and may have transformers.
#
# With --install alone it makes the environment and runs nothing. One waits for another
# that makes it.
#
# It ends with status 75 where the environment cannot be had, and says why.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.build/pytorch
# Free space that the environment needs, in MB.
space_mb=6000

unavailable() {
	echo "examples/pytorch-pd cannot run: $*"
	exit 75
}

make_venv() {
	mkdir -p "$root/.build"
	exec 9>"$root/.build/pytorch.lock"
	command -v flock >/dev/null && flock 9
	stamp=$venv/installed
	cmp -s "$here/requirements.txt" "$stamp" 2>/dev/null && return
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
		unavailable "it needs python3 3.11 or later, or PYTHON=/path/to/python with torch"
	[ "$(uname -s)" = Linux ] || unavailable "tierd serve runs on Linux"
	free_mb=$(df -Pm "$root/.build" | awk 'NR == 2 { print $4 }')
	[ "$free_mb" -ge "$space_mb" ] || unavailable "$root/.build has $free_mb MB free, and PyTorch needs $space_mb"
	rm -rf "$venv"
	if ! python3 -m venv "$venv" >"$root/.build/pytorch.log" 2>&1; then
		# Debian has venv in a package of its own.
		if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
			{ apt-get update -qq && apt-get install -y -qq python3-venv; } || true
		fi
		rm -rf "$venv"
		python3 -m venv "$venv" >"$root/.build/pytorch.log" 2>&1 ||
			unavailable "python3 -m venv failed: $(tail -n 1 "$root/.build/pytorch.log")"
	fi
	echo "installing PyTorch and what else requirements.txt lists (2 GB to fetch, once)"
	"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-compile --no-deps -r "$here/requirements.txt" >"$root/.build/pytorch.log" 2>&1 ||
		unavailable "pip could not install requirements.txt: $(grep -m 1 -i error "$root/.build/pytorch.log" || echo "see .build/pytorch.log")"
	cp "$here/requirements.txt" "$stamp"
}

if [ -z "${PYTHON:-}" ]; then
	make_venv
	exec 9>&-
	PYTHON=$venv/bin/python
fi
"$PYTHON" -c 'import torch, grpc, google.protobuf, yaml' 2>/dev/null ||
	unavailable "$PYTHON cannot import torch, grpc, google.protobuf and yaml: $("$PYTHON" -c 'import torch, grpc, google.protobuf, yaml' 2>&1 | tail -n 1)"
[ "$*" = --install ] && exit 0
exec "$PYTHON" "$here/pair.py" "$@"
