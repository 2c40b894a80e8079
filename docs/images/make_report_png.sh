#!/usr/bin/env bash
# Train LeNet on Fashion-MNIST twice, write a report about both runs, and take pictures of it with a headless Chromium.
# Needs Debian's chromium and dataset-fashion-mnist.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

for lr in 0.2 0.05; do
    NPROC=2 launch/local.sh model=lenet data=fashion_mnist epochs=5 "optimizer.lr=$lr" report=true \
        "output_dir=$folder" "name=lenet-lr-$lr"
done
.venv/bin/python -m ddp_trainer report "$folder/lenet-lr-0.2" "$folder/lenet-lr-0.05" \
    "output=$folder/report.html" 'title=LeNet on Fashion-MNIST'
cp "$folder/lenet-lr-0.2/evaluation/last-test/confusion_matrix.png" docs/images/confusion_matrix.png

picture() {  # name, width, height, further options
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars "--user-data-dir=$folder/profile" \
        --virtual-time-budget=5000 "--window-size=$2,$3" "--screenshot=docs/images/report_$1.png" "${@:4}" \
        "file://$folder/report.html"
}
picture light 1100 1600
picture dark 1100 1600 --blink-settings=preferredColorScheme=0
picture narrow 390 1600
