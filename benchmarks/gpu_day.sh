#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in at most 40 minutes: tests, benchmarks and the paper's LocAteR experiment.
#
#   ATTNSWAP_DATA=/path/to/data benchmarks/gpu_day.sh          # writes docs/results/gpu/ and docs/results/gpu.md
#   ATTNSWAP_DATA=/path/to/data benchmarks/gpu_day.sh --dry    # tiny sizes on the CPU, into a temporary folder
#
# --root FOLDER writes below that folder instead. PYTHON names the interpreter (else .venv/bin/python, else python3); it
# needs the extra [test] (the rows of litgpt: pip install --no-deps litgpt==0.5.13), and no network. A part that fails or
# takes too long does not end the others, and its state is in parts.csv. Given again, the script leaves out the parts that
# are done and goes on with the others, within tests and tables too: where less than 40 minutes are to be had at once,
# GPU_DAY_SECONDS says how many, and another call goes on.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

dry=""
root=""
while [ $# -gt 0 ]; do
    case "$1" in
    --dry) dry=yes ;;
    --root)
        [ $# -ge 2 ] || { echo "--root needs a folder" >&2; exit 2; }
        root="$2"
        shift
        ;;
    *)
        echo "unknown argument $1; there are --dry and --root FOLDER" >&2
        exit 2
        ;;
    esac
    shift
done

if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON="$PWD/.venv/bin/python"; else PYTHON=python3; fi
fi
"$PYTHON" -c "import torch" || { echo "$PYTHON has no torch; set PYTHON to the interpreter that has" >&2; exit 1; }
if [ -z "$dry" ] && ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "no CUDA device was found; --dry runs everything on the CPU at tiny sizes" >&2
    exit 1
fi

# Where results go: this repository; a new folder in a dry run, and where the repository cannot be written to.
writable() { mkdir -p "$1/docs/results/gpu" 2>/dev/null && touch "$1/docs/results/gpu/.writable" 2>/dev/null; }
if [ -z "$root" ]; then
    if [ -z "$dry" ] && writable "$PWD"; then root="$PWD"; else root="$(mktemp -d)"; fi
fi
writable "$root" || { echo "$root cannot be written to; give another by --root FOLDER" >&2; exit 1; }
root="$(cd "$root" && pwd)"
out="$root/docs/results/gpu"
rm -f "$out/.writable"
[ -e "$root/docs/results/gpu.md" ] || cp docs/results/gpu.md "$root/docs/results/gpu.md"
echo "results: $out"

# Runs, logs and caches outside the repository, one place for each folder of results, so that a second call finds them.
work="${TMPDIR:-/tmp}/attnswap_gpu_day_$(id -u)_$(printf %s "$root" | cksum | cut -d' ' -f1)"
mkdir -p "$work/logs" "$work/cache" || exit 1
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline MPLBACKEND=Agg PYTHONUNBUFFERED=1
export MPLCONFIGDIR="$work/cache/matplotlib" TRITON_CACHE_DIR="$work/cache/triton"
export TORCHINDUCTOR_COMPILE_THREADS=4 # of each of several processes
export TORCHINDUCTOR_CACHE_DIR="$work/cache/inductor" ATTNSWAP_CACHE="$work/cache/attnswap"
if [ -n "$dry" ]; then export ATTNSWAP_GPU_TESTS=cpu OMP_NUM_THREADS=1; else unset ATTNSWAP_GPU_TESTS; fi

# Without an installation `attnswap.datamodules` is not found, which is the folder datamodules.
if ! "$PYTHON" -c "import attnswap.datamodules" 2>/dev/null; then
    echo "attnswap is not installed in $PYTHON: installing the repository, without its requirements"
    "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation -e . >"$work/logs/install.log" 2>&1 ||
        echo "that failed ($work/logs/install.log): what needs attnswap.datamodules will fail too" >&2
fi

# One call at a time: what an earlier one, which was killed, left running ends by its own limit.
if command -v flock >/dev/null; then
    exec 9>"$work/lock"
    flock -n 9 || { echo "waiting until a part of another call has ended"; flock 9; }
fi

# Ctrl-C and SIGTERM end the parts that run, and the next call goes on with these.
stop() {
    trap - INT TERM
    kill ${child:-} $(jobs -p) 2>/dev/null
    wait
    exit 143
}
trap stop INT TERM

parts="$out/parts.csv"
[ -e "$parts" ] || echo "part,state,seconds,limit" >"$parts"
end=$((SECONDS + ${GPU_DAY_SECONDS:-2340})) # the page is made after

# Run a part under a limit in seconds and write down its state; one that is done is left out.
part() {
    local name="$1" limit="$2" begun=$SECONDS code state left=$((end - SECONDS))
    shift 2
    trap stop INT TERM # again where a part runs beside others
    grep -q "^$name,done" "$parts" && { echo "$name: done before"; return; }
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 1 ]; then
        echo "$name,no time was left,0,0" >>"$parts"
        return
    fi
    for _ in 1 2 3; do # 3: the device was lost, and a new process goes on after the row that lost it
        timeout -k 15 $((limit - (SECONDS - begun))) "$@" >>"$work/logs/$name.log" 2>&1 &
        child=$!
        wait "$child"
        code=$?
        child=""
        [ $code -eq 3 ] || break
        [ $((limit - (SECONDS - begun))) -ge 1 ] || break
    done
    case $code in
    0) state="done" ;;
    124) state="stopped by its limit" ;;
    137) state="killed" ;;
    *) state="failed with exit code $code" ;;
    esac
    [ "$name" = tests ] && [ $code -eq 1 ] && state="done with failures"
    [ "$name" = tests ] && [ $code -eq 5 ] && state="done" # none was left
    echo "$name,$state,$((SECONDS - begun)),$limit" >>"$parts"
    echo "$name: $state after $((SECONDS - begun)) s (log: $work/logs/$name.log)"
}

tests() {
    local workers=()
    if [ -z "$dry" ] && "$PYTHON" -c "import xdist" 2>/dev/null; then workers=(-n "${GPU_DAY_WORKERS:-6}" --dist worksteal); fi
    local some=()
    # A dry run takes one test of each file and kind.
    if [ -n "$dry" ]; then some=(-k "rpc or mha or boolean or spectrum or LocAteR"); fi
    part tests "$1" "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/gpu --gpu-results "$out/tests.csv" \
        ${workers[@]+"${workers[@]}"} ${some[@]+"${some[@]}"}
}

locater() {
    local name="$1" recipe="$2" limit="$3" folder="$work/runs/$1" sizes
    sizes=(--trainer.max_steps 20000 --trainer.val_check_interval 2000 --trainer.accelerator gpu)
    if [ -n "$dry" ]; then
        sizes=(--trainer.max_steps 4 --trainer.val_check_interval 2 --trainer.accelerator cpu
            --trainer.limit_val_batches 2 --data.batch_size 4 --model.model.init_args.dim 16 --trainer.log_every_n_steps 1)
    fi
    [ -n "$(find "$folder" -name '*.ckpt' 2>/dev/null | head -n 1)" ] && sizes+=(--ckpt_path last)
    part "$name" "$limit" "$PYTHON" -m attnswap fit --config "$recipe" --model.optimizer.init_args.lr 2.5e-5 \
        --trainer.devices 1 --trainer.enable_progress_bar false --trainer.default_root_dir "$folder" "${sizes[@]}"
}

bench() { part "$1" "$2" "$PYTHON" -m benchmarks.gpu "$1" --output "$out" ${dry:+--dry}; }

part about 60 "$PYTHON" -m benchmarks.gpu about --output "$out" ${dry:+--dry}
# Nothing here is timed closely, so it shares the device.
locater locater_mean locater/wikitext2 660 &
locater locater_free locater/wikitext2/free 660 &
locater locater_baseline locater/wikitext2/baseline 660 &
tests 660
wait
"$PYTHON" -m benchmarks.gpu locater --runs "$work/runs" --output "$out" ${dry:+--dry} >"$work/logs/locater.log" 2>&1
# From here on one at a time: these are timed.
bench rpc 270
bench training 600
bench memory 240
bench mechanisms 600
if "$PYTHON" -m docs.pages build --root "$root"; then
    echo "page: $root/docs/results/gpu.md"
else
    echo "the page was not made; with the raw files: $PYTHON -m docs.pages build --root $root" >&2
fi
cat "$parts"
