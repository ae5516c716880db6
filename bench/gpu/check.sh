#!/bin/sh
# All that a GPU is needed to see, in two stages of at most 9 minutes each, so that a machine that is lent for minutes
# shows something in any case. From a clone's root, with the Python that has a CUDA build of torch:
#
#     sh bench/gpu/check.sh tests                          # tests/gpu, and the kernels' unit tests, compiled
#     sh bench/gpu/check.sh bench [options of bench.gpu]   # figures against the roofline
#
# Results go to $OUT where that is set (ranks.xml, kernels.xml, memory.xml, gpu-DATE.json), else to bench/results. A stage
# that runs out of time is interrupted as by Ctrl-C, and tells what it has. Exit status 0: all tests passed, or every target was met.
set -u
stage=${1:-}
case $stage in tests|bench) shift ;; *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-540}
results=${OUT:-bench/results}
export PYTHONPATH=".:worker:protos${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
began=$(date +%s)

# Nothing can be fetched where there is no network: packages that are missing have to travel along.
"$PYTHON" - <<'EOF' || exit 2
import sys
from importlib.metadata import PackageNotFoundError, version

wanted = {"protobuf": (6, 31), "numpy": (), "psutil": (), "pydantic": (2,), "opentelemetry-api": (), "pytest": (), "pytest-xdist": (),
          "safetensors": (), "torch": (2, 11),
          "transformers": ()}
problems = []
for name, least in wanted.items():
    try:
        found = tuple(int(part) for part in version(name).split("+")[0].split(".")[:2] if part.isdigit())
    except PackageNotFoundError:
        problems.append(f"{name} is missing")
    else:
        if found < least:
            problems.append(f"{name} {version(name)} is older than {'.'.join(map(str, least))}")
if problems:
    sys.exit("carry wheels along: " + "; ".join(problems))
EOF
[ -e worker/hetero_worker/native/libhetero_compute.so ] || "$PYTHON" -m hetero_worker.native.build || echo "going on without the library: exchanges will be slower"
left=$((LIMIT_S - $(date +%s) + began))

# -k: what does not end on SIGINT is killed before the machine's own limit.
run() {
    limit=$1; shift
    timeout -s INT -k 15 "$limit" "$PYTHON" -m "$@"
}
test_files() {
    name=$1; limit=$2; shift 2
    run "$limit" pytest --noconftest -c bench/gpu/pytest.ini --rootdir . -q -rfEs --durations=15 \
        --junitxml="$results/$name.xml" "$@"
}
if [ "$stage" = tests ]; then
    mkdir -p "$results"
    export OMP_NUM_THREADS=1
    cores=$(nproc)
    processes=$((cores < 10 ? cores : 10))
    kernels="$(ls tests/unit/kernels/test_*matmul.py) tests/unit/kernels/test_routing.py"
    kernels="$kernels tests/unit/kernels/test_fused.py tests/unit/kernels/test_paged_attention.py"
    kernels="$kernels tests/unit/kernels/test_sampling_kernels.py tests/unit/kernels/test_delta_kernels.py"
    alone="tests/gpu/test_memory_kept.py tests/gpu/test_sleep.py"
    together=$(ls tests/gpu/test_*.py | grep -v -e memory_kept -e sleep.py)
    # Kernels and ranks side by side, in many processes; tests of the device's memory after them, alone.
    most=$(((left - 20) * 3 / 4))
    test_files kernels $most -n $processes -p tests.support.kernels_on_gpu $kernels \
        --deselect tests/unit/kernels/test_sampling_kernels.py::test_tokens_are_the_hosts_on_every_layout > "$results/kernels.log" 2>&1 &
    test_files ranks $most -n $processes $together
    status=$?
    wait $!
    of_kernels=$?
    tail -n 60 "$results/kernels.log"
    [ $status -ne 0 ] || status=$of_kernels
    test_files memory $((LIMIT_S - 20 - $(date +%s) + began)) $alone
    of_memory=$?
    [ $status -ne 0 ] || status=$of_memory
else
    run $((left - 20)) bench.gpu --limit-s $((left - 40)) --results "$results" "$@"
    status=$?
fi
echo "check.sh $stage: exit status $status after $(($(date +%s) - began)) s"
exit $status
