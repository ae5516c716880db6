#!/bin/sh
# All that a GPU is needed to see, in two stages of at most 9 minutes each, so that a machine that is lent for minutes
# shows something in any case. From a clone's root, with the Python that has a CUDA build of torch:
#
#     sh bench/gpu/check.sh tests                          # tests/gpu, the cheap and telling ones first
#     sh bench/gpu/check.sh bench [options of bench.gpu]   # figures against the roofline
#
# Results go to $OUT where that is set (tests.xml, gpu-DATE.json), else to bench/results. A stage that runs out of time
# is interrupted as by Ctrl-C, and tells what it has. Exit status 0: all tests passed, or every target was met.
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

wanted = {"protobuf": (6, 31), "numpy": (), "psutil": (), "pydantic": (2,), "pytest": (), "safetensors": (), "torch": (2, 11),
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
if [ "$stage" = tests ]; then
    timeout -s INT -k 15 $((left - 20)) "$PYTHON" -m pytest --noconftest -c bench/gpu/pytest.ini --rootdir . -q -rfEs \
        --durations=20 --junitxml="$results/tests.xml" tests/gpu/test_device_services.py tests/gpu/test_reference.py \
        tests/gpu/test_gpu_runner.py tests/gpu/test_mixed_group.py tests/gpu
else
    timeout -s INT -k 15 $((left - 20)) "$PYTHON" -m bench.gpu --limit-s $((left - 40)) --results "$results" "$@"
fi
status=$?
echo "check.sh $stage: exit status $status after $(($(date +%s) - began)) s"
exit $status
