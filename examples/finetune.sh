#!/usr/bin/env bash
# Fine-tune a model on a folder of pictures, then score it, export it and write a report:
#
#     examples/finetune.sh PICTURES WEIGHTS [KEY=VALUE …]
#
# PICTURES has a folder per class; a fifth of the pictures is held out. WEIGHTS is a file of weights
# for the model, by default a ResNet-18 (torchvision's, timm's or your own), or null for random ones.
set -euo pipefail
if (($# < 2)); then
    echo "usage: $0 PICTURES WEIGHTS [KEY=VALUE …]" >&2
    exit 2
fi
pictures=$1
weights=$2
shift 2
run=${RUN:-outputs/finetune}

local=$(dirname "$0")/../launch/local.sh

"$local" experiment=finetune "data.root=$pictures" data.validation_fraction=0.2 "model.weights=$weights" \
    "output_dir=$(dirname "$run")" "name=$(basename "$run")" "$@"
"$local" evaluate "$run"
"$local" export "$run" format=safetensors
"$local" report "$run"
