#!/bin/sh
# From a bare Debian 12 to the passed tests: installs what is missing, builds with warnings as errors, runs them all.
# MOE4_TEST_DATA=DIR adds the tests on real checkpoints; without it they are skipped and counted.
set -eu
cd "$(dirname "$0")/.."
tools/install_packages.sh g++ cmake ninja-build pkg-config binutils nlohmann-json3-dev libcli11-dev libfmt-dev \
    libgtest-dev libbenchmark-dev
cmake --preset ci
cmake --build --preset ci
log=build/ci/test.log
status=0
ctest --preset ci "$@" >"$log" 2>&1 || status=$?
skipped=$(grep -c '\*\*\*Skipped' "$log" || true)
[ "$status" = 0 ] || cat "$log"
tail -n 25 "$log"
echo "skipped: $skipped (no GPU, an instruction set that this CPU lacks, or MOE4_TEST_DATA not set)"
exit "$status"
