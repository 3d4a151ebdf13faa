#!/bin/sh
# A checkpoint becomes an engine, and the engine answers a file of requests.
#
#   samples/convert_and_generate.sh WORK [CHECKPOINT]
#
# WORK: directory for the engine and the answers. CHECKPOINT: a Hugging Face directory or a .gguf file; default: the sample model.
# Typed again it goes on where it stands: the engine is kept, and a finished job says "already done".
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=${1:?name a directory to work in}
checkpoint=${2:-$("${PYTHON:-python3}" "$here/sample_model.py")}

mkdir -p "$work"
[ -f "$work/engine/engine.json" ] || dspark convert "$checkpoint" "$work/engine"
dspark inspect "$work/engine"
dspark generate "$here/chat.jsonl" "$work/out.jsonl" --engine "$work/engine" --max-tokens 64 --metrics "$work/metrics.json"
"${PYTHON:-python3}" "$here/show_answers.py" "$here/chat.jsonl" "$work/out.jsonl" --metrics "$work/metrics.json"
