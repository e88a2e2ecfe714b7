"""The museum: public errors of trainers, and how each is found here.

`docs/known_errors.md` shows this table, and `test_museum.py` checks both. `method` and `expected`
were written before the error was run. `missed` is what was found instead.

Dates are those of commits and reports in public repositories. A begin that could not be found is
None.
"""

from dataclasses import dataclass
from enum import StrEnum


class Method(StrEnum):
    """A way to find an error. The value is what the page prints."""

    COPY = "reduced copy"
    """`tools/verify.py`. `expected` is the comparison that fails first."""
    INVARIANTS = "replicas compared in the run"
    """`--check-invariants-interval`. `expected` is a part of the error of the run."""
    RULE = "rule before the start"
    """A rule of the plan. `expected` is a part of its message."""
    COMPARE = "a recorded step"
    """`tools/verify.py --compare`. `expected` is the first number that differs."""
    TYPES = "types of tensors over ranks"
    """`tools/verify.py --types`. `expected` is the part of the model that the message names."""
    MODEL = "comparison with transformers"
    """Logits and all gradients of a model of this class. `expected` is what differs."""
    REPLAY = "a microbatch computed twice"
    """`--replay-interval`. `expected` is a part of the error of the run."""


@dataclass(frozen=True)
class KnownError:
    """A public error of a trainer."""

    mutation: str
    """Name of the mutation, which is also the name of the error."""
    trainer: str
    """The heading of the page that has it."""
    source: str
    """A repository and a number, or a repository, a colon and a file."""
    area: str
    wrong: str
    """What was wrong, as a sentence."""
    cost: str
    """What it cost, as it was reported, or its effect on the numbers."""
    since: str | None
    """When the error came: the date of a commit, or another fact about its age."""
    until: str
    """When it was fixed. Or when it was reported, if no correction was found."""
    method: Method
    expected: str
    missed: str = ""
    """What was found instead, if the method did not find the error as written."""


MEGATRON = "NVIDIA/Megatron-LM"
TITAN = "pytorch/torchtitan"
DEEPSPEED = "deepspeedai/DeepSpeed"
NEOX = "EleutherAI/gpt-neox"
CHRONICLES = "bigscience-workshop/bigscience"
BLOOM_PAGE = "BLOOM and 104B (Megatron-DeepSpeed)"
REST = "Other trainers"

ERRORS = (
    # -- BLOOM and the 104B model ------------------------------------------------------------------
    KnownError(
        "gradients are clipped on the first tensor rank only",
        BLOOM_PAGE,
        f"{DEEPSPEED}#1801",
        "clipping",
        "BF16_Optimizer clipped no gradients on tensor ranks above 0, so the layer norms of the "
        "ranks drifted apart.",
        "The chronicle of BLOOM: norms were copied between ranks before each forward pass from "
        "checkpoint 17,235 on. After a first repair 60 % of one kind of norm were equal again.",
        "2022-03-11, the start of BLOOM's training",
        "2022-03-24",
        Method.INVARIANTS,
        "replicated state differs",
    ),
    KnownError(
        "the tied embedding of the last stage is not clipped",
        BLOOM_PAGE,
        f"{CHRONICLES}:train/tr11-176B-ml/chronicles-prequel.md",
        "clipping",
        "Gradients of the tied embedding were not clipped on the last pipeline rank, so both ends "
        "drifted apart.",
        "Loss spikes at restarts in the trials before BLOOM. Found by dumps of all tensors before "
        "and after a restart.",
        None,
        "2022-03",
        Method.INVARIANTS,
        "embedding.word.weight",
    ),
    KnownError(
        "the norm of the embedding decays",
        BLOOM_PAGE,
        f"{CHRONICLES}:train/tr11-176B-ml/chronicles-prequel.md",
        "optimizer",
        "The layer norm after the embedding was in the group with weight decay, because the class "
        "that was tested for was another one of the same name.",
        "The chronicle names it as the cause of loss spikes at restarts. Trial runs were repeated.",
        None,
        "2022-03",
        Method.COPY,
        "weights",
    ),
    KnownError(
        "the step of Adam is not restored",
        BLOOM_PAGE,
        f"{DEEPSPEED}#1525",
        "resume",
        "The step count of apex's FusedAdam was neither saved nor restored. Each resume began with "
        "the bias correction of step 1.",
        "The chronicle of the 104B model: 1.15 to 2.2 times the learning rate in the first five "
        "iterations of each resume. Experiments had to be repeated.",
        None,
        "DeepSpeed 0.5.10. It came back and was fixed again in 2023-09 (#4396)",
        Method.COPY,
        "step count",
    ),
    KnownError(
        "the inner width of another model is left in the script",
        BLOOM_PAGE,
        f"{CHRONICLES}:train/tr8-104B-wide/chronicles.md",
        "configuration",
        "FFN_HIDDEN_SIZE kept the 20,480 of the 13B model, where 65,536 was meant.",
        "Five experiments with a model of 58B parameters that was thought to have 104B.",
        "experiment 1",
        "experiment 6",
        Method.RULE,
        "is not 4 x",
    ),
    KnownError(
        "each tensor rank has the ALiBi slopes of the first one",
        BLOOM_PAGE,
        "bigscience-workshop/Megatron-DeepSpeed#244",
        "positions",
        "With tensor parallelism, the heads of each rank had the slopes of the first rank's heads.",
        "not reported",
        "2021-09-24",
        "2022-02-01",
        Method.COPY,
        "loss",
    ),
    # -- DeepSpeed ---------------------------------------------------------------------------------
    KnownError(
        "the gradient norm counts replicated parameters on each tensor rank",
        "DeepSpeed",
        f"{DEEPSPEED}#5411",
        "clipping",
        "A flat group held parameters that tensor ranks shard and others that they replicate. All "
        "of them were counted on each rank.",
        "Convergence changed with the number of tensor ranks.",
        None,
        "2024-04-17",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "the reduction of one microbatch is lost",
        "DeepSpeed",
        f"{DEEPSPEED}#6550",
        "accumulation",
        "ZeRO 2 with offload copied gradients where it should have added them to those of the "
        "microbatches before.",
        "Gradients were wrong with gradient accumulation.",
        "2020-09-09",
        "2024-09-26",
        Method.COPY,
        "gradient norm",
    ),
    # -- Megatron-LM -------------------------------------------------------------------------------
    KnownError(
        "gradients of norms are not summed under sequence parallelism",
        "Megatron-LM",
        f"{MEGATRON}#1446",
        "tensor parallelism",
        "The gradients of the final layer norm differed between tensor ranks.",
        "not reported. In GPT-NeoX the same error held the loss at 8 (#1257)",
        None,
        "reported 2025-03-04",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "gradients of a norm inside of attention are not summed",
        "Megatron-LM",
        f"{MEGATRON}#7452",
        "tensor parallelism",
        "A norm that all tensor ranks replicate, and apply to their own heads, got the gradient of "
        "these heads only, except with sequence parallelism.",
        "A review found it. No run is named.",
        None,
        "reported 2026-09",
        Method.TYPES,
        "norm",
    ),
    KnownError(
        "the norm counts the experts of one rank",
        "Megatron-LM",
        f"{MEGATRON}#5916",
        "experts",
        "The gradient norm was too small with expert and tensor parallelism together.",
        "Clipping began too late.",
        None,
        "2026-07-25",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "auxiliary losses are not divided by the number of microbatches",
        "Megatron-LM",
        f"{MEGATRON}#5047",
        "experts",
        "With --calculate-per-token-loss, the scale of the auxiliary losses depended on the number "
        "of tensor ranks.",
        "Losses of otherwise equal runs differed between layouts.",
        "2025-04-02",
        "2026-06-02",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "a gradient is sent before it is complete",
        "Megatron-LM",
        f"{MEGATRON}#3693",
        "races",
        "The stream that reduces gradients waited for the default stream, and not for the one that "
        "computed them.",
        "not reported",
        "2024-11-30",
        "2026-03-19",
        Method.REPLAY,
        "two passes with the same inputs gave different values",
    ),
    KnownError(
        "a step starts from what is left in the gradient buffer",
        "Megatron-LM",
        f"{MEGATRON}#4609",
        "accumulation",
        "The buffer of gradients also received weights, and was not set to zero before the next "
        "step added to it.",
        "Gradients were wrong with --overlap-param-gather and the layer-wise optimizer.",
        "2026-03-04",
        "2026-05-05",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "attention reaches into the document before",
        "Megatron-LM",
        f"{MEGATRON}#2357",
        "data",
        "--reset-attention-mask built a mask, which Transformer Engine ignored.",
        "Attention leaks between documents, without a message.",
        None,
        "reported 2025-11-21",
        Method.COPY,
        "labels, masks and positions",
    ),
    KnownError(
        "the gradient of a column-parallel layer's input is not summed",
        "Megatron-LM",
        f"{MEGATRON}#1699",
        "tensor parallelism",
        "With multi-latent attention, each tensor rank got the gradient of a shared positional key "
        "from its own heads only.",
        "not reported",
        "2025-02-24",
        "reported 2025-07-21. A correction was open in 2026-08 (#6839)",
        Method.TYPES,
        "must send all_reduce",
    ),
    # -- torchtitan --------------------------------------------------------------------------------
    KnownError(
        "the loss is divided by the count of the rank's own tokens",
        "torchtitan",
        f"{TITAN}#2206",
        "loss",
        "Each rank and microbatch divided its loss by its own number of tokens.",
        "Tokens on ranks with few tokens had too much weight.",
        "2025-06-05, with gradient accumulation (#1238)",
        "2026-01-25",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "gradients are divided by the number of microbatches on each stage",
        "torchtitan",
        f"{TITAN}#1732",
        "accumulation",
        "The schedule divided all gradients so far by the number of microbatches, once for each "
        "accumulation.",
        "Gradients became a moving average and were much too small.",
        "2025-06-05, with gradient accumulation (#1238)",
        "2025-09-24",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "each stage clips by its own gradient norm",
        "torchtitan",
        f"{TITAN}#649",
        "clipping",
        "Each pipeline stage computed the norm of its own gradients, and clipped by it.",
        "Stages were clipped by different factors (issue #596).",
        "2024-05-21, with pipeline parallelism",
        "2024-11-16",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "gradients of routers are not summed over tensor-parallel ranks",
        "torchtitan",
        f"{TITAN}#1878",
        "experts",
        "The gradient that flows back from experts that tensor ranks shard was not summed.",
        "All layers below got a part of their gradient.",
        "2025-04-07",
        "2025-10-14",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "the choices of a step are counted again in the next one",
        "torchtitan",
        f"{TITAN}#4148",
        "experts",
        "The counts of an evaluation moved the bias that balances experts in the next step.",
        "not reported",
        "2025-08-22",
        "2026-08-16",
        Method.COPY,
        "weights",
    ),
    KnownError(
        "the bias of a row-parallel layer is added on each rank",
        "torchtitan",
        f"{TITAN}#4245",
        "tensor parallelism",
        "The bias of the experts' last matrix was added on each tensor rank before the sum.",
        "not reported",
        None,
        "2026-08-21",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the bias that balances experts is not in the checkpoint",
        "torchtitan",
        f"{TITAN}#1226",
        "resume",
        "An update replaced the buffer of the bias by a new tensor, and the checkpoint kept the "
        "old one.",
        "Saved biases were always zero.",
        "2025-04-18",
        "2025-05-27",
        Method.COPY,
        "state after the resume",
    ),
    KnownError(
        "the learning rate restarts after a resume",
        "torchtitan",
        f"{TITAN}#275",
        "resume",
        "The state of the learning rate's schedule was not saved.",
        "A resumed run began the schedule again.",
        "2024-02-06, with checkpoints",
        "2024-04-25",
        Method.COPY,
        "learning rate",
    ),
    KnownError(
        "gradients of experts are divided by fewer ranks",
        "torchtitan",
        f"{TITAN}#1551",
        "experts",
        "FSDP divided the gradients of experts by the ranks that hold the expert, and not by all "
        "that have data.",
        "Gradients of experts were too large by the number of expert ranks.",
        "2025-07-08",
        "2025-08-11",
        Method.COPY,
        "gradient norm",
    ),
    # -- OLMo --------------------------------------------------------------------------------------
    KnownError(
        "copies of the model start from different weights",
        "OLMo",
        "allenai/OLMo-core#319",
        "initialisation",
        "Each rank drew its shards with a seed of its own, so the copies of HSDP differed.",
        "A bad run of OLMo 3 1B was restarted. The restart hid the error, because all copies "
        "loaded the same checkpoint.",
        "2025-06-28",
        "2025-07-08",
        Method.COPY,
        "initial weights",
    ),
    KnownError(
        "shards of a parameter start from equal values",
        "OLMo",
        "allenai/OLMo-core#307",
        "initialisation",
        "All ranks drew their shards of a parameter with the same seed.",
        "not reported. The correction caused #319",
        None,
        "2025-06-28",
        Method.COPY,
        "initial weights",
    ),
    KnownError(
        "the step count of Adam does not grow",
        "OLMo",
        "allenai/OLMo-core#309",
        "optimizer",
        "The optimizer that can skip a step never increased its step count, so each update had the "
        "bias correction of the first one.",
        "Updates were biased.",
        "2025-01-21",
        "2025-06-30",
        Method.COPY,
        "weights",
    ),
    KnownError(
        "the z-loss is a sum over tokens",
        "OLMo",
        "allenai/OLMo#634",
        "loss",
        "The sum of the z-loss over tokens was divided by the number of microbatches, and not by "
        "the number of tokens.",
        "not reported",
        "2024-06-11",
        "2024-06-26",
        Method.COPY,
        "loss",
    ),
    # -- GPT-NeoX ----------------------------------------------------------------------------------
    KnownError(
        "a resume counts microbatches as steps",
        "GPT-NeoX",
        f"{NEOX}#308",
        "resume",
        "A resume began at the batch with the number of the iteration, and each iteration had "
        "read several batches.",
        "Resumed runs read earlier samples again.",
        None,
        "2021-05-08",
        Method.COPY,
        "samples",
        "the resume is refused earlier, with the two positions that differ (the checkpoint counts "
        "12 consumed samples, but its data position is 4).",
    ),
    KnownError(
        "biases of row-parallel layers are imported once for each rank",
        "GPT-NeoX",
        f"{NEOX}#1220",
        "import",
        "An import gave the full bias to each tensor rank, which GPT-NeoX adds up.",
        "Imported models computed with multiples of these biases.",
        None,
        "2024-06-06",
        Method.COMPARE,
        "input of layer 1",
    ),
    # -- Hugging Face ------------------------------------------------------------------------------
    KnownError(
        "the loss is the mean of microbatches with unequal counts",
        "Hugging Face (transformers, accelerate)",
        "huggingface/transformers#34191",
        "loss",
        "With gradient accumulation, the loss was the mean of the means of microbatches, whatever "
        "their numbers of tokens.",
        "Losses differed from those of large batches. Many trainers had the same error.",
        None,
        "2024-10",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the learning rate moves once for each process",
        "Hugging Face (transformers, accelerate)",
        "huggingface/transformers#24088",
        "learning rate",
        "Two layers of the trainer corrected the schedule for the number of processes.",
        "With N processes, the schedule ended after 1/N of the run.",
        None,
        "2023-06-07",
        Method.COPY,
        "learning rate",
    ),
    KnownError(
        "the learning rate moves once for each microbatch",
        "Hugging Face (transformers, accelerate)",
        "huggingface/accelerate#999",
        "learning rate",
        "The schedule moved with each microbatch of gradient accumulation.",
        "The learning rate changed too early (issue #963).",
        "2022-03-31",
        "2023-01-23",
        Method.COPY,
        "learning rate",
    ),
    KnownError(
        "the gradient norm omits a shard",
        "Hugging Face (transformers, accelerate)",
        "huggingface/accelerate#3465",
        "clipping",
        "A wrong test of the version chose the clipping of FSDP 1 for FSDP 2.",
        "not reported",
        "2025-03-27",
        "2025-03-28",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "norms decay",
        "Hugging Face (transformers, accelerate)",
        "huggingface/transformers#35927",
        "optimizer",
        "Weight decay excluded torch.nn.LayerNorm, but not the models' RMSNorm classes.",
        "Norms of Llama, Qwen and others decayed.",
        None,
        "2025 (opened on 2025-01-28)",
        Method.COPY,
        "weights",
    ),
    # -- others ------------------------------------------------------------------------------------
    KnownError(
        "gradients of query groups that ranks share are not summed",
        REST,
        "bigcode-project/Megatron-LM#39",
        "tensor parallelism",
        "With multi-query attention, the gradients that flow back through shared keys and values "
        "were not summed over tensor ranks.",
        "Validation loss of a small model after 5,000 steps: 3.74 instead of 2.64. Larger ones "
        "diverged after some thousand steps (issue #35).",
        "doubted in 2022-12 (issue #11)",
        "2023-03-21",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "gradients of keys are not summed over the ranks of a sequence",
        REST,
        "NVIDIA/TransformerEngine#1557",
        "context parallelism",
        "The gradients of attention were wrong with context parallelism that sends keys from rank "
        "to rank.",
        "Relative errors up to 1.2 in activations and 2.3 in gradients of weights.",
        None,
        "reported 2025-03-11",
        Method.COPY,
        "gradient norm",
    ),
    KnownError(
        "tensor ranks start from equal shards",
        REST,
        "modelscope/ms-swift#7944",
        "initialisation",
        "All tensor ranks drew their shards with the same seed. InternLM had the same error "
        "(#405, 2023-10-09).",
        "not reported",
        None,
        "2026-01-30",
        Method.COPY,
        "initial weights",
    ),
    KnownError(
        "all data-parallel ranks read the same samples",
        REST,
        "ml-explore/mlx-lm#294",
        "data",
        "A mistyped name let all workers load the same data.",
        "not reported",
        None,
        "2025-07-11",
        Method.COPY,
        "samples",
    ),
    KnownError(
        "context parallelism drops the sinks",
        REST,
        "NVIDIA/TransformerEngine#3551",
        "context parallelism",
        "Attention that sends keys from rank to rank did not pass the sinks of its heads to the "
        "kernel. The combination was refused before (#2541).",
        "Results were those without sinks, and their gradients were zero.",
        None,
        "2026-09-20",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the state of a gated delta net goes on into the next document",
        REST,
        "PrimeIntellect-ai/prime-rl#3003",
        "documents",
        "With context parallelism, the gated delta rule computed a row of several documents as one "
        "sequence.",
        "Outputs of a document differed by 0.46 from those without context parallelism.",
        None,
        "2026-07-11",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the convolution of a gated delta net reads the document before",
        REST,
        "NVIDIA-NeMo/Automodel#2147",
        "documents",
        "Convolution and state of Qwen 3.5 continued from one packed sample into the next.",
        "Outputs of a layer differed by 0.40 from those of single samples.",
        None,
        "2026-05-06",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the convolution begins again at each part of a sequence",
        REST,
        "PrimeIntellect-ai/prime-rl#3002",
        "context parallelism",
        "The convolution used the document bounds of a rank's part of the sequence, so it started "
        "again at each part.",
        "Outputs were wrong even with one document in a row.",
        None,
        "2026-07-11",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "the borders of documents are those of a rank's part",
        REST,
        "PrimeIntellect-ai/prime-rl#2392",
        "context parallelism",
        "The first position of a rank's part of the sequence was used as a length.",
        "The bounds lay outside of the part, and the run ended with an error.",
        None,
        "2026-05-02",
        Method.COPY,
        "loss",
    ),
    KnownError(
        "a packed projection is cut across its parts",
        "Megatron-LM",
        f"{MEGATRON}#1989",
        "tensor parallelism",
        "The packed projection of a gated delta net was sharded as one matrix, not part by part.",
        "Training worked on one tensor rank, and failed on several.",
        None,
        "reported 2025-12-10",
        Method.COPY,
        "initial weights",
    ),
    KnownError(
        "gradients of a gated delta net's norm cover the heads of one rank",
        "Megatron-LM",
        f"{MEGATRON}#7452",
        "tensor parallelism",
        "The output norm of a gated delta net is replicated, and its gradients were not added up "
        "over the tensor ranks.",
        "A review found it. No run is named.",
        None,
        "reported 2026-09",
        Method.COPY,
        "gradient norm",
        "found by the gradients. Those of the norm are a small part of the gradient norm.",
    ),
    KnownError(
        "the gradient norm has the sinks of the first tensor rank only",
        "Megatron-LM",
        f"{MEGATRON}#7452",
        "tensor parallelism",
        "Each tensor rank has its own sinks, and the gradient norm counted only the first rank's.",
        "A review found it. No run is named.",
        None,
        "reported 2026-09",
        Method.COPY,
        "parts of the norm",
    ),
    KnownError(
        "leave out the gradient of the factor",
        "torchtitan",
        f"{TITAN}#4796",
        "attention sinks",
        "The factor of the sinks is computed from the logsumexp of the variable-length kernel, "
        "which has no gradient.",
        "Gradients of queries and keys of gpt-oss were incomplete; with one visible key they were "
        "zero.",
        "2026-06-16, with the kernel",
        "2026-09-19",
        Method.MODEL,
        "weights",
    ),
    KnownError(
        "add the sink to the logits",
        "Hugging Face (transformers, accelerate)",
        "huggingface/transformers#41083",
        "attention sinks",
        "FlexAttention applied the sinks to the scores, which is before the softmax.",
        "It crashed if there were sinks (#41026).",
        None,
        "2025-09",
        Method.MODEL,
        "sinks",
    ),
)
