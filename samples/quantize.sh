#!/bin/sh
# An engine in 8 and in 4 bits beside the one that it came from.
#
#   samples/quantize.sh ENGINE WORK
#
# ENGINE: an engine directory, or any checkpoint that `dspark convert` reads. WORK: directory for the new engines.
set -eu
engine=${1:?name an engine directory or a checkpoint}
work=${2:?name a directory to work in}

mkdir -p "$work"
dspark quantize "$engine" "$work/w8a16" --scheme w8a16 --force
# Layers may be left as they are: here the widest ones, which cost most when they are rounded.
dspark quantize "$engine" "$work/w4a16" --scheme w4a16 --ignore '*.down_proj' --force
for name in w8a16 w4a16; do
  echo
  dspark inspect "$work/$name"
done
