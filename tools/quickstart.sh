#!/bin/sh
# From a bare Debian 12 to the main job: installs what is missing, builds, and judges the sample layer.
set -eu
cd "$(dirname "$0")/.."
tools/install_packages.sh g++ cmake ninja-build nlohmann-json3-dev libcli11-dev libfmt-dev
cmake --preset release -DMOE4_TESTS=OFF >/dev/null
cmake --build --preset release --target moe4_cli
exec build/release/moe4 layertest samples/tiny-modelopt --layer 0 --reference samples/tiny-bf16
