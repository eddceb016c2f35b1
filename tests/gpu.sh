#!/usr/bin/env bash
# All that needs GPUs, in one go: tests, a doctor, figures. One GPU is enough for most; a second one adds NVLink and NCCL.
#
#   bash tests/gpu.sh [SECTION...]      all sections by default; --help names them
#
# PYTHON names the interpreter (default: .venv's, else python3), OUT the folder for logs and figures (default:
# gpu-results). Every section has a limit of its own, its log in OUT, and a line in the table at the end. The exit code is
# 1 if any failed. Sections of one GPU share the machine two at a time where there are two GPUs; those that measure run
# alone.
set -uo pipefail
case "${PYTHON:-}" in
*/*) PYTHON="$(cd "$(dirname "${PYTHON}")" && pwd)/$(basename "${PYTHON}")" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ONE_GPU="launch kernels sanitize shared2 shared4 shared8 shared16" # tests on one GPU, in any company
ALONE="nccl tiers doctor overlap figures stages chains bench prefill" # all GPUs, or figures
PAIR="nccl tiers overlap chains bench prefill"                       # two GPUs at least

case " $* " in
*" -h "* | *" --help "*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' tests/gpu.sh; echo "Sections: ${ONE_GPU} ${ALONE}"; exit 0 ;;
esac
chosen="${*:-${ONE_GPU} ${ALONE}}"
for section in ${chosen}; do
    case " ${ONE_GPU} ${ALONE} " in
    *" ${section} "*) ;;
    *) echo "no section is called ${section}; there are ${ONE_GPU} ${ALONE}" >&2; exit 2 ;;
    esac
done

# NVLink multicast stays off in the project's own runs, because shared test hosts can be put out of service by it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="${PWD}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
if ! GPUS="$("${PYTHON}" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)"; then
    echo "${PYTHON} has no torch: \`make setup\` first, or name another one in PYTHON" >&2
    exit 2
fi
if [ "${GPUS}" -eq 0 ]; then
    echo "torch sees no GPU here (${PYTHON})" >&2
    exit 2
fi
mkdir -p "${OUT:=gpu-results}"
OUT="$(cd "${OUT}" && pwd)"
export OUT
: >"${OUT}/sections.txt"

# run NAME SECONDS COMMAND...: one section
run() {
    local name="$1" limit="$2" start="${SECONDS}" code
    shift 2
    timeout --kill-after 10 "${limit}" "$@" >"${OUT}/${name}.log" 2>&1
    code=$?
    local end=ok
    if [ "${code}" -eq 124 ] || [ "${code}" -eq 137 ]; then end="LATE (${limit} s)"; elif [ "${code}" -ne 0 ]; then end="FAILED (${code})"; fi
    printf '%-14s %-14s %4d s   %s\n' "${name}" "${end}" "$((SECONDS - start))" \
        "$(grep -aE '[0-9]+ (passed|failed|skipped)|^[0-9]+ failures' "${OUT}/${name}.log" | grep -av rank | tail -1 | tr -d '=')" \
        >>"${OUT}/sections.txt"
}

ranks() { # ranks W COMMAND...
    local world="$1"
    shift
    "${PYTHON}" -m torch.distributed.run --standalone --nproc-per-node "${world}" "$@"
}
export -f ranks
export PYTHON
tests() { # tests NAME SECONDS W ARGUMENTS...
    local name="$1" limit="$2" world="$3"
    shift 3
    run "${name}" "${limit}" bash -c 'ranks "$@"' ranks "${world}" -m pytest -v -p no:cacheprovider "$@"
}

D=tests/distributed
DEVICE="${D}/test_cuda_memory.py ${D}/test_staged_cuda.py ${D}/test_lane_cuda.py ${D}/test_tail_cuda.py"

launch() { tests launch 90 1 "${D}/test_launch_gpu.py" --log-cli-level=info; }
shared2() { tests shared2 200 2 ${DEVICE} --shared-gpu; }
shared4() { tests shared4 300 4 ${DEVICE} --shared-gpu -k "not accuracy or separate_reduce"; }
shared8() { tests shared8 300 8 ${DEVICE} --shared-gpu -k "not accuracy or separate_reduce"; }
shared16() { tests shared16 300 16 "${D}/test_tail_cuda.py" --shared-gpu -k "not accuracy"; }
kernels() { run kernels 150 "${PYTHON}" benchmarks/tail_lab.py numerics ranks stop; }
sanitize() { run sanitize 240 "${PYTHON}" benchmarks/tail_lab.py sanitize; }
figures() { run figures 120 "${PYTHON}" benchmarks/tail_lab.py bench; }
stages() { run stages 120 "${PYTHON}" benchmarks/tail_stages.py stages left-out link; }
nccl() { tests nccl 300 "${GPUS}" "${D}/test_cuda.py" ${DEVICE} --nccl; }
tiers() { tests tiers 250 "${GPUS}" "${D}/test_tiers.py" --nccl; }
doctor() { run doctor 60 bash -c 'ranks "$@"' ranks "${GPUS}" -m k3comm doctor --device cuda; }
chains() { run chains 90 bash -c 'ranks "$@"' ranks "${GPUS}" benchmarks/tail_ranks.py --shots; }
bench() {
    run bench 400 bash -c 'ranks "$@"' ranks "${GPUS}" -m k3comm bench --rows "${ROWS:-1,2,4,8,16,32,64}" \
        --replays "${REPLAYS:-200}" --json "${OUT}/bench.json"
}
prefill() {
    local plot=()
    if "${PYTHON}" -c 'import matplotlib' 2>/dev/null; then plot=(--plot "${OUT}/prefill.png"); fi
    run prefill 280 bash -c 'ranks "$@"' ranks "${GPUS}" benchmarks/prefill.py --json "${OUT}/prefill.json" "${plot[@]}"
}
overlap() {
    tests overlap 250 "${GPUS}" "${D}/test_overlap_cuda.py" --nccl
    run overlap_us 250 bash -c 'ranks "$@"' ranks "${GPUS}" benchmarks/overlap.py --json "${OUT}/overlap.json"
}

IFS=, read -ra DEVICES <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((GPUS - 1)))}"

gpu=0
for section in ${chosen}; do
    case "${GPUS}  ${PAIR} " in
    "1 "*" ${section} "*)
        printf '%-14s %s\n' "${section}" "not run: it needs two GPUs" >>"${OUT}/sections.txt"
        continue
        ;;
    esac
    case " ${ONE_GPU} " in
    *" ${section} "*)
        if [ "${GPUS}" -gt 1 ]; then
            CUDA_VISIBLE_DEVICES="${DEVICES[gpu]}" "${section}" &
            gpu=$((1 - gpu))
            if [ "${gpu}" -eq 0 ]; then wait; fi
        else
            "${section}"
        fi
        ;;
    *)
        wait
        "${section}"
        ;;
    esac
done
wait
for log in figures stages chains bench prefill overlap_us; do
    if [ -s "${OUT}/${log}.log" ]; then tail -45 "${OUT}/${log}.log"; fi
done
cat "${OUT}/sections.txt"
! grep -qE 'FAILED|LATE' "${OUT}/sections.txt"
