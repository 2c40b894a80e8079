#!/usr/bin/env bash
# Run everything that needs a GPU: tests, steps and their kernels, other trainers, accuracy, a cache of images. One H100
# takes 20 minutes; choose parts by ONLY.
#   WHEELS=folder DATA=folder OUT=folder ONLY="tests steps" benchmarks/gpu.sh
# WHEELS: wheels of the packages that the Python of this host lacks, and of ddp_trainer (no network is used); DATA: the
# four files of Fashion-MNIST; OUT: the folder for logs and results. DRY_RUN=1 prints the commands.
# A part that fails does not keep the others from running.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
OUT=${OUT:-outputs/gpu}
DATA=${DATA:-/usr/share/datasets/fashion-mnist}
ONLY=${ONLY:-doctor tests steps peers recipes photos}
failed=()

part() { # name, seconds, command …: run one command of a part with a time limit, and keep its output
    local name=$1 seconds=$2
    shift 2
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
    [[ " $ONLY " == *" ${name%%-*} "* ]] || return
    echo "== $name"
    timeout "$seconds" "$@" >"$OUT/$name.log" 2>&1 || failed+=("$name")
    tail -n 25 "$OUT/$name.log"
}

if [[ -z ${DRY_RUN:-} ]]; then
    mkdir -p "$OUT"
    if [[ -n ${WHEELS:-} ]]; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$OUT/site" "$WHEELS"/*.whl || exit
    fi
fi
export PYTHONPATH=$PWD:$OUT/site

train=("$PYTHON" -m torch.distributed.run --master-addr=127.0.0.1 --nproc_per_node=1 -m ddp_trainer "output_dir=$OUT/runs")
part doctor 60 "$PYTHON" -m ddp_trainer doctor
part tests 400 "$PYTHON" -m pytest -m gpu -q -n 4 -p no:cacheprovider -p no:benchmark tests/test_gpu.py
part steps 300 "$PYTHON" benchmarks/gpu_steps.py "--data=$DATA" "--results=$OUT"
for model in lenet resnet18; do
    for size in 256 1024; do
        part "peers-$model-$size" 240 "$PYTHON" benchmarks/compare.py --device=cuda --ranks=1 "--model=$model" \
            "--global-batch-size=$size" --rounds=1 --workers=8 "--data=$DATA" "--results=$OUT/peers-$size"
    done
done
for seed in 0 1 2; do
    part "recipes-$seed" 90 "${train[@]}" experiment=fashion_mnist_resnet18 "data.root=$DATA" "seed=$seed" "name=seed-$seed"
done
part recipes-fast 60 "${train[@]}" experiment=fashion_mnist_fast "data.root=$DATA"
part photos-written 120 "$PYTHON" benchmarks/write_pictures.py "$OUT/pictures" --count=12800
part photos 120 "${train[@]}" model=resnet18 data=imagefolder "data.root=$OUT/pictures" data.validation_fraction=0.05 \
    data.cache=uint8 "data.cache_dir=$OUT/cache" global_batch_size=256 epochs=8 log_every_steps=10 name=photos

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
