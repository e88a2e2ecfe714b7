"""The least that a rank needs before its first step, as a contestant of `engines.py --part start`.

It imports nothing but torch, joins the process group, and trains one matrix. On several ranks it
uses FSDP2, as the trainer does. With an argument, it also imports torch's pipeline schedules, which
a layout with pipeline parallelism needs.
"""

import os
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """Join the ranks, train one step, and print a line that the benchmark waits for."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        # FSDP2 uses the current device.
        torch.cuda.set_device(device)
    model = torch.nn.Linear(128, 128, device=device)
    if dist.get_world_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    if len(sys.argv) > 1:
        from torch.distributed import pipelining  # noqa: F401
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 128, device=device)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(" iteration 1", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
