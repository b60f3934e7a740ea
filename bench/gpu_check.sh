#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build, tests, benchmarks, compute-sanitizer.
#
#   bench/gpu_check.sh              on a machine with a GPU, nvcc, cmake, ninja, torch 2.11 or newer,
#                                   pybind11, pytest and transformers; no network
#   bench/gpu_check.sh --dry-run    the same stages on the host layer, to see that they work: the
#                                   benchmarks run at tiny sizes and print no figures
#   bench/gpu_check.sh attention    this stage alone, with what was built before; also several
#
# The engine needs msgspec and pyzmq besides, and the benchmarks compare with FlashInfer where it is
# (flashinfer-python, and what that requires). What the machine lacks is carried to it as wheels, in
# the folder wheels/ of the repository or in $WHEELS. For one with Python 3.12:
#
#   pip download --only-binary=:all: --no-deps --python-version 3.12 -d wheels msgspec pyzmq llguidance
#
# (llguidance is for the engine's test of grammars alone, which is skipped without.)
#
# Wheels of packages that the interpreter has are left alone; the others are installed, each time, in
# build/gpu_check/packages.
#
# Writes <gpu>-<date>.json, .md and .log into bench/results (or $OUT, if set). A stage that fails,
# runs out of time or lacks a Python package is recorded, and the next one runs.
# PYTHON= chooses the interpreter, BUDGET= the seconds for all of it.
#
# Tests are chosen by the marker `cuda`; the dry run takes the same tests on the host layer. That no
# test was chosen, or all were skipped, is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=
if [ "${1:-}" = --dry-run ]; then
  dry=--dry-run
  shift
fi
# Seconds that no earlier stage can take from each: one may run for its own, for what the stages
# before it left, and no longer. The build's is half of all, which 16 cores should not need.
declare -A share=(
  [build]=240 [tests]=35 [attention]=40 [small_kernels]=15 [sampling]=10 [end_to_end]=55
  [memcheck]=28 [racecheck]=28 [engine]=17 [synccheck]=12
)
known=" build tests attention small_kernels sampling end_to_end memcheck racecheck engine synccheck "
wanted=" $* "
for name in "$@"; do
  [[ $known == *" $name "* ]] || {
    echo "usage: bench/gpu_check.sh [--dry-run] [STAGE...]; stages:$known" >&2
    exit 2
  }
done
[ $# -gt 0 ] || wanted=$known

python=${PYTHON:-python3}
wheels=${WHEELS-wheels}
[ -z "${WHEELS-}" ] || compgen -G "$WHEELS/*.whl" > /dev/null || {
  echo "WHEELS=$WHEELS: no *.whl there" >&2
  exit 2
}
budget=${BUDGET:-480}
reserved=0 # seconds, of the stages to come
for name in $wanted; do
  reserved=$((reserved + share[$name]))
done
out=${OUT:-bench/results}
build=build/gpu_check
packages=$PWD/$build/packages
export PYTHONPATH="$PWD/python:$PWD/tests/python:$packages${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
# The interpreter's own cmake and ninja, where there are no others.
PATH+=:$(dirname "$(command -v "$python")")
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

# Of these modules and commands (bin/<name>), the ones that are not here.
missing() {
  "$python" - "$@" << 'END'
import sys
from importlib.util import find_spec
from shutil import which
for name in sys.argv[1:]:
    if (which(name[4:]) if name.startswith("bin/") else find_spec(name)) is None:
        print(name)
END
}

# Says what a stage lacks, and which wheels would help.
not_run() { # <name> <modules and commands>...
  local stage=$1 name said= carry=
  shift
  for name in "$@"; do
    said+=", ${name#bin/}"
    case $name in
      bin/*) ;;
      zmq) carry+=", pyzmq" ;;
      *) carry+=", $name" ;;
    esac
  done
  echo "== $stage: not run, lacks ${said#, }"
  [ -z "$carry" ] ||
    echo "   put into ${wheels:-wheels}/ the wheels, for $("$python" -V), of: ${carry#, }"
  record "$stage" "\"not run: lacks ${said#, }\"" 0
}

# The packages in the folder of wheels that the interpreter lacks.
carried() {
  "$python" - "$wheels" << 'END'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
for name in sorted({path.name.split("-")[0] for path in Path(sys.argv[1]).glob("*.whl")}):
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
END
}

# Puts them where the interpreter finds them.
install_carried() {
  local names
  rm -rf "$packages"
  [ -n "$wheels" ] || return 0
  mapfile -t names < <(carried)
  [ ${#names[@]} -gt 0 ] || return 0
  echo "== wheels: ${names[*]}"
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps \
    --find-links "$wheels" --target "$packages" "${names[@]}" >> "$log" 2>&1 && return
  echo "   failed: $log"
  record wheels 1 0
}

# Of a stage's output, a line per figure.
progress() {
  sed -un 's/^{"stage": "\([^"]*\)", "name": "\([^"]*\)", "us": "\?\([^,"}]*\).*/   \1: \2: \3 us/p'
}

record() { # <name> <status, a number or a JSON string> <seconds>
  printf '{"stage": "run", "name": "%s", "status": %s, "seconds": %d}\n' "$@" >> "$work/lines"
}

# stage <name> <needs> <command>...: keeps its output in the log, and its JSON lines.
stage() {
  local name=$1 needs=$2 begin=$SECONDS limit lacks status
  shift 2
  [[ $wanted == *" $name "* ]] || return 0
  reserved=$((reserved - share[$name]))
  # shellcheck disable=SC2086
  lacks=$(missing $needs)
  if [ -n "$lacks" ]; then
    # shellcheck disable=SC2086
    not_run "$name" $lacks
    return 0
  fi
  limit=$((budget - SECONDS - reserved))
  if [ "$limit" -le 0 ]; then
    echo "== $name: not run, the time is up"
    record "$name" '"not run: no time left"' 0
    return 0
  fi
  echo "== $name (after $SECONDS s of $budget; at most $limit s)"
  echo "== $name" >> "$log"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$log" | tee "$work/stage" | progress
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
    cp --remove-destination "$build"/csrc/bindings/*.so python/vllm_lite/
}

# run_tests <part, or ""> <path>...: the tests that need a device, or their twins on the host layer.
# Some must have passed and none failed, whatever pytest's status is and a tool makes of it.
run_tests() {
  local part=$1 chosen=(-m cuda)
  shift
  if [ -n "$dry" ]; then
    chosen=(-k "cuda_on_host${part:+ and ($part)}")
  elif [ -n "$part" ]; then
    chosen+=(-k "$part")
  fi
  # shellcheck disable=SC2086
  $under "$python" -m pytest -q -p no:cacheprovider "${chosen[@]}" "$@" | tee "$work/tests"
  [ "${PIPESTATUS[0]}" -eq 0 ] && grep -E '^[0-9]+ passed' "$work/tests" | grep -qv error
}

# Each kernel family under a tool of compute-sanitizer, which makes kernels 10 to 50 times slower:
# attention of every head size, with and without Hopper's kernels, split, over float8; sampling;
# caches; experts; norms, rotations and what else the op table has. initcheck is not among the
# tools: the tests copy every tensor to the device whole, so that it has nothing to find.
sanitized() { # <tool>
  local ops=tests/python/ops
  # torch tries calls that fail; those of the project's kernels are checked where they are launched.
  under="compute-sanitizer --tool $1 --error-exitcode 9 --report-api-errors no"
  [ -z "$dry" ] || under=
  run_tests "bfloat16 or not (float16 or float32)" \
    "$ops/test_op_table.py::test_matches_the_float64_reference" \
    "$ops"/test_attention_cuda.py::test_{hopper_kernels_give_the_same_bits,fp8_cache} \
    "$ops/test_attention_cuda.py::test_split_ranges_give_the_bits_of_whole_items" \
    "$ops/test_sampling.py::test_the_choice_equals_the_reference" \
    "$ops/test_sampling.py::test_penalties_by_hand_at_the_first_and_second_step" \
    "$ops/test_sampling.py::test_logprobs_are_of_the_raw_logits" \
    "$ops/test_kv_ops.py::test_fused_is_bit_equal_to_rope_and_store_in_a_float8_cache" \
    "$ops/test_moe_ops.py::test_a_layer_of_experts_is_the_sum_over_its_experts"
}
export -f build run_tests sanitized
export build dry python work under=

install_carried
toolchain="torch pybind11 bin/cmake bin/ninja"
[ -n "$dry${CUDACXX:-}" ] || toolchain+=" bin/nvcc"
engine="numpy torch msgspec zmq tokenizers jinja2 tqdm safetensors"
sanitizer="torch numpy pytest"
[ -n "$dry" ] || sanitizer+=" bin/compute-sanitizer"
engine_tests=tests/python/engine/test_cuda.py
[ -z "$dry" ] || engine_tests=tests/python/engine/test_cuda_on_host.py

stage build "$toolchain" bash -c build
stage tests "torch numpy pytest" bash -c 'run_tests "" tests/python/ops'
# shellcheck disable=SC2086
{
  stage attention "torch" "$python" bench/gpu/attention.py $dry
  stage small_kernels "torch" "$python" bench/gpu/small_kernels.py $dry
  stage sampling "torch" "$python" bench/gpu/sampling.py $dry
  stage end_to_end "$engine" "$python" bench/gpu/end_to_end.py $dry
}
for tool in memcheck racecheck; do
  stage $tool "$sanitizer" bash -c "sanitized $tool"
done
stage engine "$engine pytest transformers" bash -c "run_tests '' $engine_tests"
stage synccheck "$sanitizer" bash -c "sanitized synccheck"
"$python" bench/gpu/summarise.py "$work/lines" "$result"
