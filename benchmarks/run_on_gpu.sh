#!/usr/bin/env bash
# Installs, tries everything, measures and tests: all that only a machine with a GPU can say about this package. It fits
# one call of 560 s, begins with what matters most, and each step writes its results when it ends, because a borrowed
# machine may be gone at any moment. It needs one GPU and torch with CUDA, no network; pytest and hypothesis for the
# tests, and nvcc and setuptools if there is no wheel. Lightning, transformers, compute-sanitizer and pytest-xdist are
# used if they are there.
#
#   benchmarks/run_on_gpu.sh                     # everything but sanitize
#   benchmarks/run_on_gpu.sh install kernels     # some of: install smoke memory link step hook fuzz kernels sanitize
#   benchmarks/run_on_gpu.sh --device pretend    # rehearses it without a GPU, on the device in tests/pretend/
#
# OUT: folder for results and the log (benchmarks/results). PYTHON: the interpreter (python3). WORKERS: how many tests at
# once (4), each with ranks of its own on the GPU; PAIRS: how many with two ranks on NCCL (2). KERNEL_OPTIONS: those of
# cuda_kernels.py. TOTAL_SECONDS: when to stop (550). If dist/ has a wheel, its extension is used in the checkout instead
# of compiling one. The exit status is the number of steps that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
OUT=$(realpath -m "${OUT:-benchmarks/results}")
LOG=$OUT/run_on_gpu.log
PYTHON=${PYTHON:-python3}
TOTAL_SECONDS=${TOTAL_SECONDS:-550}
DEVICE=cuda
if [ "${1:-}" = --device ]; then
  DEVICE=$2
  shift 2
fi
STAGES=("$@")
[ ${#STAGES[@]} -eq 0 ] && STAGES=(install smoke memory link step hook fuzz kernels)
mkdir -p "$OUT"
: >"$LOG"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [ "$DEVICE" = cuda ]; then
  export DDP_HOOKS_CUDA=1 DDP_HOOKS_REQUIRE_CUDA=1
else
  export DDP_HOOKS_CUDA=0
fi
export DDP_HOOKS_TESTING=1 PATH=$PATH:/usr/local/cuda/bin MAX_JOBS=${MAX_JOBS:-$(nproc)}
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

compile() {
  TAIL=40 run compile 240 "$PYTHON" setup.py --quiet build_ext --inplace || exit $FAILED
}

# A wheel saves the minutes that kernels take to compile, until tests need the extension that no wheel contains.
stage_install() {
  local wheels=(dist/ddp_hooks-*.whl)
  if [ "$DEVICE" = cuda ] && [ -e "${wheels[0]}" ]; then
    run install 30 "$PYTHON" - "${wheels[@]}" <<'END'
import sys, zipfile

for path in sys.argv[1:]:
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(members=[name for name in wheel.namelist() if name.endswith(".so")])
END
  else
    compile
  fi
  [ "$DEVICE" = pretend ] ||
    "$PYTHON" -c 'import torch; from ddp_hooks import _C; assert _C.why_unserved(torch.device("cuda", 0)) is None' || exit 1
}

needs_tests() {
  compgen -G 'ddp_hooks_testing/*.so' >/dev/null || compile
}

stage_smoke() {
  local parts=(hook doctor sync fsdp lightning transformers hangs) hangs=30
  [ "$DEVICE" = pretend ] && hangs=5
  TAIL=20 run smoke 80 "$PYTHON" benchmarks/gpu_smoke.py --device "$DEVICE" --out "$OUT" --parts "${parts[@]}" --hang-seconds $hangs
}

stage_memory() {
  for ranks in 2 8; do
    run "memory_$ranks" 30 "$PYTHON" benchmarks/gpu_smoke.py --device "$DEVICE" --out "$OUT" --parts memory --ranks $ranks \
      --name "gpu_memory_${ranks}_$DEVICE"
  done
}

# On the pretended device, times mean nothing.
stage_link() {
  needs_tests
  local rehearsal=()
  [ "$DEVICE" = pretend ] && rehearsal=(--shapes resnet50 --rounds 1)
  TAIL=90 run link 150 "$PYTHON" benchmarks/emulated_link.py --device "$DEVICE" --out "$OUT" "${rehearsal[@]}"
}

# On the pretended device counts take the place of times.
stage_step() {
  if [ "$DEVICE" = pretend ]; then
    TAIL=40 run step 120 "$PYTHON" benchmarks/device_counts.py --out "$OUT" --shapes resnet50 --variants allreduce_hook skip_unused auto
  else
    TAIL=40 run step 80 "$PYTHON" benchmarks/cuda_step.py --out "$OUT" --worlds nccl:2 --rounds 40 --workloads dense table autocast \
      --name cuda_step_pair
  fi
}

# Pairs of ranks on NCCL two at a time: their kernels spin while they wait for each other, and take the GPU's time from
# everything else.
stage_hook() {
  needs_tests
  if [ "$DEVICE" = pretend ]; then
    tests hook 80 -k 'test_same_as_plain_ddp and graph-native' tests/engine/test_pretend.py
  else
    tests hook_on_nccl_pairs 60 "${FEW[@]}" -k 'nccl- or nccl]' tests/engine/test_cuda_hook.py
  fi
}

stage_fuzz() {
  needs_tests
  local programs=20
  [ "$DEVICE" = pretend ] && programs=5
  run fuzz 40 "$PYTHON" tests/campaigns/fuzz.py --device "$DEVICE" --seeds 0:$programs
}

stage_kernels() {
  needs_tests
  if [ "$DEVICE" = pretend ]; then
    tests kernels 80 tests/kernels/test_cuda_indexing.py
  else
    TAIL=60 run cuda_kernels 20 "$PYTHON" benchmarks/cuda_kernels.py --out "$OUT" --rounds 3 ${KERNEL_OPTIONS:-}
    tests kernels 40 "${MANY[@]}" tests/kernels/test_cuda_kernels.py
  fi
}

stage_sanitize() {
  needs_tests
  if ! command -v compute-sanitizer >/dev/null; then
    say "sanitize: compute-sanitizer is not found, so accesses were not checked on the device"
    return
  fi
  # A few tests of each kernel: under the tool each takes many times as long. Without torch's cache of memory every
  # tensor is an allocation of its own, so that an access past its end is one past an allocation.
  local some='test_every_alignment or (test_many_slices and 249) or test_empty_slices or test_scan_of_random'
  some+=' or (test_packs_random_slices and 100) or (test_sums_of_contributions and 3-3.0) or test_samples_of_units'
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

[ "$DEVICE" = pretend ] || "$PYTHON" - <<'END'
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
