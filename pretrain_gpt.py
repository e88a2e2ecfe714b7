"""Pretrain a GPT: read the configuration, resolve the plan, join the ranks, start or resume, train.

On one device:
    python pretrain_gpt.py --num-layers 12 ...
On four devices of one node:
    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...
Every flag, with its unit and source:
    python pretrain_gpt.py --help

The same as the command `megatron-pretrain`. What a rank does is in `megatron/run/pretrain.py`.
"""

from megatron.commands.pretrain import main

if __name__ == "__main__":
    main()
