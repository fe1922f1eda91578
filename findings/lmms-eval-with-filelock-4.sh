#!/usr/bin/env bash
# Version: lmms-eval 0.7.3 (PyPI), filelock 4.3.1 and 3.32.7
# Behaviour: lmms-eval imports filelock's private module filelock._api at the first evaluation, but sets no limit on
#   its version; filelock 4 has no such module, so an installation that pip calls complete evaluates nothing.
# Seen: filelock 4.3.1: No module named 'filelock._api'; filelock 3.32.7: imported
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
pip() { venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
pip download --no-deps --dest wheel lmms-eval==0.7.3
venv/bin/python - wheel/*.whl > imports.txt <<'PY'
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()
print("required:", re.findall(r"^Requires-Dist: (filelock[^\n;]*)", metadata, re.MULTILINE) or "by others alone", file=sys.stderr)
print(*sorted(set(re.findall(r"^\s*(import filelock\S*)", wheel.read("lmms_eval/evaluator.py").decode(), re.MULTILINE))), sep="\n")
PY
cat imports.txt
grep -qx 'import filelock._api' imports.txt
pip install filelock==4.3.1
if venv/bin/python imports.txt 2> error.txt; then
    echo "filelock 4.3.1: imported, which is no longer as stated"
    exit 1
fi
echo "filelock 4.3.1: $(tail -1 error.txt)"
grep -q "ModuleNotFoundError: No module named 'filelock._api'" error.txt
pip install filelock==3.32.7
venv/bin/python imports.txt
echo "filelock 3.32.7: imported"
