#!/usr/bin/env bash
# Run everything that needs a GPU: tests, throughput beside other trainers, accuracy. Each part has a time limit; the
# sum of the limits is 17 minutes.
#   WHEELS=folder DATA=folder OUT=folder benchmarks/gpu.sh
# WHEELS: wheels of the packages that the Python of this host lacks (no network is used); DATA: the four files of
# Fashion-MNIST; OUT: the folder for logs, runs and results. A part that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu}
DATA=${DATA:-/usr/share/datasets/fashion-mnist}
mkdir -p "$OUT"
failed=()

part() { # name, seconds, command …: run one part with a time limit, and keep its output
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" >"$OUT/$name.log" 2>&1 || failed+=("$name")
    tail -n 25 "$OUT/$name.log"
}

if [[ -n ${WHEELS:-} ]]; then
    "$PYTHON" -m venv --system-site-packages .venv-gpu
    PYTHON=$PWD/.venv-gpu/bin/python
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" "$WHEELS"/*.whl || exit 1
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . || exit 1
fi

train=("$PYTHON" -m torch.distributed.run --master-addr=127.0.0.1 --nproc_per_node=gpu -m ddp_trainer
    "data.root=$DATA" "output_dir=$OUT/runs")
part doctor 60 "$PYTHON" -m ddp_trainer doctor
part tests 240 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider tests/test_gpu.py
for precision in fp32 bf16 fp16; do
    part "resnet18-$precision" 60 "${train[@]}" data=fashion_mnist "name=$precision" "precision=$precision" max_steps=468
done
part resnet18-compiled 120 "${train[@]}" data=fashion_mnist name=compiled compile=true max_steps=468
part recipe 150 "${train[@]}" experiment=fashion_mnist_resnet18
for model in resnet18 lenet; do
    part "peers-$model" 120 "$PYTHON" benchmarks/compare.py --device=cuda --ranks=1 "--model=$model" --rounds=1 \
        --workers=8 "--data=$DATA" "--results=$OUT"
done

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
