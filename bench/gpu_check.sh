#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build, tests, compute-sanitizer, benchmarks.
#
#   bench/gpu_check.sh              on a machine with a GPU, nvcc and torch 2.11 or newer; no network
#   bench/gpu_check.sh --dry-run    the same stages on the host layer, to see that they work
#
# Writes bench/results/<gpu>-<date>.json and .md (or into $OUT, if set). A stage that fails or runs
# out of time is recorded, and the next one runs. PYTHON= chooses the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=0
case "${1:-}" in
  --dry-run) dry=1 ;;
  "") ;;
  *) echo "usage: bench/gpu_check.sh [--dry-run]" >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
out=${OUT:-bench/results}
build=build/gpu_check
lines=$build/lines.jsonl
mkdir -p "$out" "$build"
: > "$lines"
export PYTHONPATH="$PWD/python:$PWD/tests/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# stage <name> <seconds> <command>...: runs it, keeps its output in a log and its JSON lines.
stage() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  echo "== $name (at most $limit s)"
  timeout --kill-after=5 "$limit" "$@" > "$build/$name.log" 2>&1
  local status=$?
  grep '^{"stage"' "$build/$name.log" >> "$lines"
  tail -n 3 "$build/$name.log" | cut -c 1-200
  printf '{"stage": "run", "name": "%s", "status": %d, "seconds": %d}\n' \
    "$name" "$status" $((SECONDS - begin)) >> "$lines"
  [ $status -eq 0 ] || echo "   failed with status $status: $build/$name.log"
  return $status
}

configure=(cmake -S . -B "$build/cmake" -G Ninja "-DPython_EXECUTABLE=$(command -v "$python")"
           -DCMAKE_BUILD_TYPE=Release)
build_extension() {
  if [ $dry -eq 1 ]; then
    "${configure[@]}" -DVLLM_LITE_CUDA=OFF -DVLLM_LITE_TESTS=ON &&
      cmake --build "$build/cmake" --target _core _ops _ops_cuda_on_host
  else
    "${configure[@]}" -DVLLM_LITE_CUDA=ON && cmake --build "$build/cmake" --target _core _ops
  fi && cp "$build"/cmake/csrc/bindings/*.so python/vllm_lite/
}

pytest_back_end() {
  local which="cuda and not cuda_on_host"
  [ $dry -eq 0 ] || which=cuda_on_host
  "$python" -m pytest -q -p no:cacheprovider -k "$which" tests/python/ops "$@"
}

sanitizer() { # the op table once more, under compute-sanitizer
  local tool
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider \
      -k "cuda and not cuda_on_host and float16" tests/python/ops/test_op_table.py || return 1
  done
}

if [ $dry -eq 1 ]; then
  gpu=dry-run
else
  gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-"))') || {
    echo "torch finds no CUDA device" >&2
    exit 1
  }
fi
export -f build_extension pytest_back_end sanitizer
export dry python build
export VLLM_LITE_TEST_BUILD=$build/cmake

declare -p configure > "$build/configure.sh"
stage build 480 bash -c ". $build/configure.sh; build_extension" || echo "what follows cannot run"
if [ $dry -eq 1 ]; then
  stage tests 600 bash -c 'pytest_back_end -x'
else
  stage tests 120 bash -c 'pytest_back_end'
  stage attention 60 "$python" bench/gpu/attention.py --quick
  stage small_kernels 30 "$python" bench/gpu/small_kernels.py
  stage sampling 30 "$python" bench/gpu/sampling.py
  stage end_to_end 90 "$python" bench/gpu/end_to_end.py
  stage engine 60 "$python" -m pytest -q -p no:cacheprovider -m cuda tests/python/engine tests/python/models
  stage sanitizer 90 bash -c sanitizer
fi
"$python" bench/gpu/summarise.py "$lines" "$out/$gpu-$(date +%F)"
