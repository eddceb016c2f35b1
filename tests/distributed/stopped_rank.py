"""One of two ranks of which one stops calling: what the other one is told. Run by test_tail_cuda.py, a process a rank.

Not a rank of the test's own session: the wait that expires ends the CUDA context of its process.

    python stopped_rank.py RANK STORE_FILE DEVICE SHARED
"""

import faulthandler
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.kernels import reference

HIDDEN, LATENT, LAYER, DEADLINE = 1024, 512, 7, 2.0


def main() -> None:
    faulthandler.dump_traceback_later(45)  # the caller waits 50 s, and shows what is on stderr
    rank, path, device, shared = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
    torch.cuda.set_device(device)
    store = dist.FileStore(path, 2)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    spec = LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=8)
    settings = Settings(allow_shared_device=shared, poll_deadline=DEADLINE)
    comm = Communicator.negotiate(spec, dist.group.WORLD, device="cuda", settings=settings)
    case = reference.integer_case(2, 3, HIDDEN, LATENT, dtype=torch.bfloat16, seed=0).to(comm.device)
    tail = comm.moe_tail(layer_index=LAYER, norm_weight=case.norm_weight, up_weight=case.up_weight)

    def call() -> torch.Tensor:
        plan = tail.plan(3, tier=Tier.TAIL_FUSION)
        return tail(case.routed[rank], case.shared[rank], case.residual, plan=plan)

    said: dict[str, object] = {"right": torch.equal(call(), reference.round_once(case.truth(), torch.bfloat16))}
    # Rank 0 calls alone; rank 1 does so after it, and finds that rank 0 has gone no further.
    if rank == 1:
        store.wait(["told"], timedelta(seconds=60))
    start = time.monotonic()
    call()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        said["torch"] = type(error).__name__
    said["seconds"] = time.monotonic() - start
    for again in ("error", "closed"):
        try:
            call()
        except k3comm.K3CommError as error:
            said[again] = f"{type(error).__name__}: {error}"
            if isinstance(error, k3comm.PeerTimeoutError):
                said["ranks"] = error.ranks
    comm.close()
    said["left"] = True
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    store.set("told" if rank == 0 else "done", "1")
    if rank == 0:  # it holds the file
        store.wait(["done"], timedelta(seconds=60))
    os._exit(0)  # what a CUDA context that has ended does to the interpreter's exit is not what is tested


if __name__ == "__main__":
    main()
