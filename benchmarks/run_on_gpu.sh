#!/usr/bin/env bash
# Builds with CUDA, tests, looks for bad accesses, and measures: all that only a machine with a GPU can say about this
# package. Needs a GPU, torch with CUDA, nvcc, setuptools, pytest and hypothesis; compute-sanitizer and
# pytest-xdist are used where they are.
#
#   benchmarks/run_on_gpu.sh                     # everything, within twenty minutes
#   benchmarks/run_on_gpu.sh build kernels       # some of: build kernels measure_kernels hook measure_step sanitize
#
# OUT: folder for results and the log (benchmarks/results). PYTHON: the interpreter (python3). WORKERS: how many tests at
# once (4), each with ranks of its own on the GPU; PAIRS: how many with two ranks on NCCL (2). KERNEL_OPTIONS: those of
# cuda_kernels.py, such as --rounds 5. TOTAL_SECONDS: when to stop (1200). Where a session may last ten minutes only, three will do, with TOTAL_SECONDS=580:
#   build kernels measure_kernels
#   build hook
#   build measure_step sanitize
# The exit status is the number of stages that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
OUT=$(realpath -m "${OUT:-benchmarks/results}")
LOG=$OUT/run_on_gpu.log
PYTHON=${PYTHON:-python3}
TOTAL_SECONDS=${TOTAL_SECONDS:-1200}
STAGES=("$@")
[ ${#STAGES[@]} -eq 0 ] && STAGES=(build kernels measure_kernels hook measure_step sanitize)
mkdir -p "$OUT"
: >"$LOG"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export DDP_HOOKS_CUDA=1 DDP_HOOKS_TESTING=1 DDP_HOOKS_REQUIRE_CUDA=1 PATH=$PATH:/usr/local/cuda/bin MAX_JOBS=${MAX_JOBS:-$(nproc)}
FAILED=0

say() {
  echo "== $*" | tee -a "$LOG"
}

# run NAME LIMIT_SECONDS COMMAND...: shows the end of what it prints, and never goes past the total.
run() {
  local name=$1 limit=$2 left=$((TOTAL_SECONDS - SECONDS)) started=$SECONDS output status
  shift 2
  if [ "$left" -lt 10 ]; then
    say "$name: left out, no time remains"
    FAILED=$((FAILED + 1))
    return 1
  fi
  [ "$limit" -gt "$left" ] && limit=$left
  UNSUPPORTED=0
  output=$(mktemp)
  # Interrupted, pytest still says what has failed so far.
  timeout --signal=INT --kill-after=15 "$limit" "$@" >"$output" 2>&1
  status=$?
  cat "$output" >>"$LOG"
  tail -n "${TAIL:-12}" "$output"
  UNSUPPORTED=$(grep -c "Device not supported" "$output")
  rm "$output"
  if [ "$status" -eq 0 ]; then
    say "$name: passed in $((SECONDS - started)) s"
  else
    say "$name: failed with status $status after $((SECONDS - started)) s (124: over its limit of $limit s)"
    FAILED=$((FAILED + 1))
  fi
  return "$status"
}

# The rank processes of the tests find their modules beside them, so the folder need not be the current one.
tests() { # NAME LIMIT_SECONDS PYTEST-ARGUMENTS...
  local name=$1 limit=$2
  shift 2
  TAIL=25 run "$name" "$limit" "${UNDER[@]}" "$PYTHON" -m pytest -v --all -ra --tb=short --maxfail=25 -p no:cacheprovider "$@"
}
UNDER=()
FEW=() MANY=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
  FEW=(-n "${PAIRS:-2}")
  MANY=(-n "${WORKERS:-4}")
fi

stage_build() {
  TAIL=40 run build 240 "$PYTHON" setup.py --quiet build_ext --inplace || exit $FAILED
  "$PYTHON" -c 'import torch; from ddp_hooks import _C; assert _C.why_unserved(torch.device("cuda", 0)) is None' || exit 1
}

stage_kernels() {
  tests kernels 150 "${MANY[@]}" tests/kernels/test_cuda_kernels.py tests/kernels/test_cuda_indexing.py
}

# Pairs of ranks on NCCL come last, two at a time: their kernels spin while they wait for each other, and take the GPU's
# time from everything else.
stage_hook() {
  tests hook 300 "${MANY[@]}" -k 'not nccl- and not nccl]' tests/engine/test_cuda_hook.py
  tests hook_on_nccl_pairs 250 "${FEW[@]}" -k 'nccl- or nccl]' tests/engine/test_cuda_hook.py
}

stage_measure_kernels() {
  TAIL=60 run cuda_kernels 200 "$PYTHON" benchmarks/cuda_kernels.py --out "$OUT" ${KERNEL_OPTIONS:-}
}

stage_measure_step() {
  TAIL=40 run cuda_step 250 "$PYTHON" benchmarks/cuda_step.py --out "$OUT"
}

stage_sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    say "sanitize: compute-sanitizer is not found, so accesses were not checked on the device"
    return
  fi
  # A few tests of each kernel: under the tool each takes many times as long. Without torch's cache of memory every
  # tensor is an allocation of its own, so that an access past its end is one past an allocation.
  local some='test_every_alignment or (test_many_slices and 249) or test_empty_slices or test_scan_of_random'
  some+=' or (test_packs_random_slices and 100) or (test_sums_of_contributions and 3-3.0) or test_samples_of_widths'
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  # racecheck watches shared memory, which no kernel here uses so far; it is run so that one that does is checked.
  # Errors of CUDA's functions are left out, because torch provokes and handles some when it starts.
  for tool in "memcheck --report-api-errors no" racecheck; do
    read -r -a options <<<"$tool"
    UNDER=(compute-sanitizer --tool "${options[@]}" --error-exitcode 99)
    tests "sanitize_${options[0]}" 90 -x -k "$some" tests/kernels/test_cuda_kernels.py
    UNDER=()
    if [ "$UNSUPPORTED" -gt 0 ]; then
      say "sanitize: compute-sanitizer does not support this device or its driver, so nothing was checked"
      FAILED=$((FAILED - 1))
      break
    fi
  done
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

"$PYTHON" - <<'END'
import torch

assert torch.cuda.is_available(), "torch sees no GPU"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
END
[ $? -eq 0 ] || exit 1
for stage in "${STAGES[@]}"; do
  "stage_$stage"
done
say "$FAILED stages failed, after $SECONDS s"
exit $FAILED
