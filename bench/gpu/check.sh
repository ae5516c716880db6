#!/bin/sh
# All that a GPU is needed to see, within 8 minutes: the exchange's library is built, tests/gpu run, then bench.gpu
# measures in what time is left. From a clone's root, with the Python that has a CUDA build of torch:
#
#     sh bench/gpu/check.sh [options of bench.gpu]
#
# Exit status 0 if the tests passed and every target was met.
set -u
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-480}
export PYTHONPATH=".:worker:protos${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
began=$(date +%s)
left() { echo $((LIMIT_S - $(date +%s) + began)); }

# Nothing can be fetched where there is no network: what is missing has to travel along.
"$PYTHON" -c 'import google.protobuf, numpy, psutil, pydantic, pytest, safetensors, torch, transformers' || exit 2
"$PYTHON" -m hetero_worker.native.build || echo "going on without the library: exchanges will be slower"

# Half of the time at most: what the tests find wrong is told, and the bench measures all the same.
timeout $((LIMIT_S / 2)) "$PYTHON" -m pytest --noconftest -c bench/gpu/pytest.ini --rootdir . -q tests/gpu
tests=$?
echo "tests/gpu: exit status $tests after $(( $(date +%s) - began )) s"

timeout "$(left)" "$PYTHON" -m bench.gpu --limit-s $(( $(left) - 15 )) "$@"
bench=$?
echo "bench.gpu: exit status $bench; all of it took $(( $(date +%s) - began )) s"
[ "$tests" -eq 0 ] && [ "$bench" -eq 0 ]
