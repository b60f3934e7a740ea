#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build, tests, benchmarks, compute-sanitizer.
#
#   bench/gpu_check.sh              on a machine with a GPU, nvcc and torch 2.11 or newer; no network
#   bench/gpu_check.sh --dry-run    the same stages on the host layer, to see that they work: the
#                                   benchmarks run at tiny sizes and print no figures
#   bench/gpu_check.sh attention    this stage alone, with what was built before; also several
#
# Writes <gpu>-<date>.json, .md and .log into bench/results (or $OUT, if set). A stage that fails,
# runs out of time or lacks a Python package is recorded, and the next one runs.
# PYTHON= chooses the interpreter, BUDGET= the seconds for all of it.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=--dry-run
  shift
fi
known=" build tests attention small_kernels sampling end_to_end engine sanitizer "
wanted=" $* "
for name in "$@"; do
  [[ $known == *" $name "* ]] || {
    echo "usage: bench/gpu_check.sh [--dry-run] [STAGE...]; stages:$known" >&2
    exit 2
  }
done
[ $# -gt 0 ] || wanted=$known

python=${PYTHON:-python3}
budget=${BUDGET:-480}
out=${OUT:-bench/results}
build=build/gpu_check
export PYTHONPATH="$PWD/python:$PWD/tests/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Where the dry run's kernels are: built here, unless somebody has built them elsewhere.
if [[ $wanted == *" build "* ]]; then
  export VLLM_LITE_TEST_BUILD=$build
else
  export VLLM_LITE_TEST_BUILD=${VLLM_LITE_TEST_BUILD:-$build}
fi

gpu=dry-run
if [ -z "$dry" ]; then
  gpu=$("$python" -c '
import torch
if not torch.cuda.is_available():
    raise SystemExit("torch finds no CUDA device; --dry-run needs none")
print(torch.cuda.get_device_name().replace(" ", "-"))') || exit 1
fi
mkdir -p "$out"
result=$out/$gpu-$(date +%F)
log=$result.log
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$log"

# Of these modules, the ones that the interpreter lacks.
missing() {
  "$python" - "$@" << 'END'
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
END
}

record() { # <name> <status, a number or a JSON string> <seconds>
  printf '{"stage": "run", "name": "%s", "status": %s, "seconds": %d}\n' "$@" >> "$work/lines"
}

# stage <name> <seconds> <modules> <command>...: keeps its output in the log, and its JSON lines.
stage() {
  local name=$1 limit=$2 modules=$3 begin=$SECONDS lacks status
  shift 3
  [[ $wanted == *" $name "* ]] || return 0
  # shellcheck disable=SC2086
  lacks=$(missing $modules)
  if [ -n "$lacks" ]; then
    echo "== $name: not run, $python lacks ${lacks// /, }"
    record "$name" "\"not run: lacks ${lacks// /, }\"" 0
    return 0
  fi
  [ "$limit" -le $((budget - SECONDS)) ] || limit=$((budget - SECONDS))
  if [ "$limit" -le 0 ]; then
    echo "== $name: not run, the time is up"
    record "$name" '"not run: no time left"' 0
    return 0
  fi
  echo "== $name (at most $limit s)"
  echo "== $name" >> "$log"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$work/stage" >> "$log"
  status=${PIPESTATUS[0]}
  grep '^{"stage"' "$work/stage" >> "$work/lines"
  grep -v '^{"stage"' "$work/stage" | tail -n 3 | cut -c 1-200
  record "$name" "$status" $((SECONDS - begin))
  [ "$status" -eq 0 ] || echo "   failed with status $status after $((SECONDS - begin)) s: $log"
  return 0
}

build() {
  local cuda=ON host_layer=OFF targets=(_core _ops)
  if [ -n "$dry" ]; then
    cuda=OFF host_layer=ON
    targets+=(_ops_cuda_on_host)
  fi
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DVLLM_LITE_CUDA=$cuda \
    -DVLLM_LITE_TESTS=$host_layer -DPython_EXECUTABLE="$(command -v "$python")" &&
    cmake --build "$build" --target "${targets[@]}" &&
    cp "$build"/csrc/bindings/*.so python/vllm_lite/
}

sanitizer() { # a part of the op table, under compute-sanitizer
  local tool
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider \
      -k "cuda and not cuda_on_host and float16" tests/python/ops/test_op_table.py || return 1
  done
}
export -f build sanitizer
export build dry python

pytest=("$python" -m pytest -q -p no:cacheprovider)
engine="numpy torch msgspec zmq tokenizers jinja2 tqdm safetensors"
if [ -n "$dry" ]; then
  tests=("${pytest[@]}" -x -k cuda_on_host tests/python/ops)
  engine_tests=("${pytest[@]}" tests/python/engine/test_cuda_on_host.py)
else
  tests=("${pytest[@]}" -k "cuda and not cuda_on_host" tests/python/ops)
  engine_tests=("${pytest[@]}" -m cuda tests/python/engine/test_cuda.py)
fi

stage build 240 "torch pybind11" bash -c build
stage tests 120 "torch numpy pytest" "${tests[@]}"
# shellcheck disable=SC2086
{
  stage attention 75 "torch" "$python" bench/gpu/attention.py $dry
  stage small_kernels 30 "torch" "$python" bench/gpu/small_kernels.py $dry
  stage sampling 30 "torch" "$python" bench/gpu/sampling.py $dry
  stage end_to_end 150 "$engine" "$python" bench/gpu/end_to_end.py $dry
}
stage engine 60 "$engine pytest transformers" "${engine_tests[@]}"
[ -n "$dry" ] || stage sanitizer 90 "torch numpy pytest" bash -c sanitizer
"$python" bench/gpu/summarise.py "$work/lines" "$result"
