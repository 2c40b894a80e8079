#!/usr/bin/env bash
# Write tensorboard.png beside this script: train LeNet on Fashion-MNIST three times (about six minutes on two cores
# with AVX-512 bf16), start TensorBoard, and take a screenshot with a headless Chromium. Needs Debian's chromium and
# dataset-fashion-mnist, and `make .venv/installed`. Usage: make_tensorboard_png.sh [folder with finished runs]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$here/../../.venv/bin
port=${PORT:-6123}
url=http://127.0.0.1:$port
scratch=$(mktemp -d)
server=
trap 'kill $server 2>/dev/null || true; rm -rf "$scratch"' EXIT

train() {
    OMP_NUM_THREADS=1 "$bin/torchrun" --nproc_per_node=2 --master-port="${MASTER_PORT:-29500}" -m ddp_trainer \
        model=lenet data=fashion_mnist epochs=10 output_dir="$runs" "$@"
}

# Arguments: FILE WIDTH,HEIGHT URL. WebGL is off, because its worker draws the charts outside of virtual time.
screenshot() {
    chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
        --disable-component-update --disable-sync --user-data-dir="$scratch/profile" --hide-scrollbars \
        --disable-3d-apis --virtual-time-budget=30000 --window-size="$2" --screenshot="$1" "$3"
}

# Start COMMAND in the background, and return when it answers.
serve() {
    "$@" >"$scratch/server.log" 2>&1 &
    server=$!
    for _ in {1..60}; do
        if "$bin/python" -c "import urllib.request as u; u.urlopen('$url/')" 2>/dev/null; then return; fi
        sleep 0.5
    done
    cat "$scratch/server.log" >&2
    exit 1
}

runs=${1:-$scratch/runs}
if (($# == 0)); then
    train name=sgd-0.2
    train name=sgd-0.02 optimizer.lr=0.02
    train name=adamw-0.002 optimizer=adamw optimizer.lr=0.002
fi

# TensorBoard stores its settings in the browser, so a page of the same origin sets them first.
mkdir "$scratch/settings"
cat >"$scratch/settings/index.html" <<'PAGE'
<script>
localStorage.setItem("_tb_global_settings", JSON.stringify({
    timeSeriesSettingsPaneOpened: false, stepSelectorEnabled: false, scalarSmoothing: 0, timeSeriesCardMinWidth: 420
}))
</script>
PAGE
serve "$bin/python" -m http.server --bind 127.0.0.1 --directory "$scratch/settings" "$port"
screenshot "$scratch/blank.png" 400,300 "$url/"
kill "$server"
wait "$server" || true

serve "$bin/tensorboard" --logdir "$runs" --host 127.0.0.1 --port "$port" --load_fast=false
sleep 10  # TensorBoard reads the events in the background
pins=$("$bin/python" -c '
import json, sys, urllib.parse
print(urllib.parse.quote(json.dumps([{"plugin": "scalars", "tag": tag} for tag in sys.argv[1:]])))
' train/loss eval/top1 throughput/images_per_second optim/lr)
screenshot "$here/tensorboard.png" 1400,845 "$url/?darkMode=false&pinnedCards=$pins#timeseries"
