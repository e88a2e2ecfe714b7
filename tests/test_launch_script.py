"""Training commands are read from Slurm and shell scripts."""

import shlex
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.launch_script import parse_command, read_launch_script

SCRIPTS = Path(__file__).parent / "fixtures" / "slurm"


def read(tmp_path: Path, text: str):
    path = tmp_path / "run.slurm"
    path.write_text(text)
    return read_launch_script(path)


def value_of(arguments: tuple[str, ...], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_slurm_script_with_nested_variables():
    script = read_launch_script(SCRIPTS / "gpt-350M.slurm")
    assert script.nodes == 4
    assert script.devices_per_node == 8
    assert script.world_size == 32
    assert value_of(script.arguments, "--tensor-model-parallel-size") == "2"
    assert value_of(script.arguments, "--pipeline-model-parallel-size") == "4"
    assert value_of(script.arguments, "--pp-partition-method") == "type:transformer|embedding"
    assert value_of(script.arguments, "--num-layers") == "24"
    assert value_of(script.arguments, "--global-batch-size") == "256"
    assert value_of(script.arguments, "--adam-beta2") == "0.95"
    assert value_of(script.arguments, "--save") == "$SCRATCH/checkpoints/gpt-350M/checkpoints/main"
    assert value_of(script.arguments, "--data-path") == "$WORK/data/my corpus/text_document"
    assert script.arguments[-2:] == ("--deepspeed_config", "./ds_config.$SLURM_JOBID.json")
    assert "--node_rank" not in script.arguments
    assert script.unresolved == ("SCRATCH", "SLURM_JOBID", "WORK")


def test_shell_script_with_arrays_and_torchrun():
    script = read_launch_script(SCRIPTS / "llama-arrays.sh")
    assert script.world_size == 8
    expected = shlex.split(
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --num-query-groups 2 "
        "--seq-length 1024 --normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 1408 "
        "--position-embedding-type rotary --micro-batch-size 4 --global-batch-size 64 "
        "--train-iters 1000 --lr 3e-4 --vocab-size 5000 --tensor-model-parallel-size=2 "
        "--save '$PWD/check points'"
    )
    assert script.arguments == tuple(expected)
    assert script.unresolved == ("EXTRA_ARGS", "PWD")


@pytest.mark.parametrize(
    ("header", "world_size"),
    [
        ("#SBATCH --nodes=48\n#SBATCH --gres=gpu:8", 384),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-node=a100:4", 8),
        ("#SBATCH --nodes 3 # three\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-task=1", 12),
        ("#SBATCH --gres=gpu:4", 4),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2", 4),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1", None),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --gres=gpu:8", 16),
        ("##SBATCH --nodes=9\n#SBATCH --nodes=2", None),
        ("#SBATCH --nodes=2\n#SBATCH --gres=tmpfs:8", None),
    ],
)
def test_world_of_the_slurm_header(tmp_path, header, world_size):
    script = read(tmp_path, f"#!/bin/bash\n{header}\nsrun python pretrain_gpt.py --fp16\n")
    assert script.world_size == world_size


def test_slurm_variables_come_from_the_header(tmp_path):
    script = read(
        tmp_path,
        "#SBATCH --nodes=5\nN=$SLURM_NNODES\n"
        "torchrun --nnodes $N --nproc_per_node=2 pretrain_gpt.py --seed $N\n",
    )
    assert script.arguments == ("--seed", "5")
    assert script.world_size == 10


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("python pretrain_gpt.py --a 1 2>&1 | tee log", ("--a", "1")),
        ("python pretrain_gpt.py --a 1 > log", ("--a", "1")),
        ("cd /x && python ./pretrain_gpt.py --a 1; echo done", ("--a", "1")),
        ("X=1 Y=2 python pretrain_gpt.py --a $X", ("--a", "1")),
        ("A=1\nA=2\npython pretrain_gpt.py --a $A", ("--a", "2")),
        ("ARGS='--a 1'\nARGS+=' --b 2'\npython pretrain_gpt.py $ARGS", ("--a", "1", "--b", "2")),
        (
            "python pretrain_gpt.py --a '$A' --b \"x y\" --c x\\ y",
            ("--a", "$A", "--b", "x y", "--c", "x y"),
        ),
        (
            "A=${B:-3}\npython pretrain_gpt.py --a $A --b=${A} --c ${C-4}",
            ("--a", "3", "--b=3", "--c", "4"),
        ),
        ("python pretrain_gpt.py --a 1 # --b 2\n# --c 3", ("--a", "1")),
        (
            "python pretrain_gpt.py --a $NOWHERE --flag=1 $OPTIONAL --b 2",
            ("--a", "$NOWHERE", "--flag=1", "--b", "2"),
        ),
        ("CMD='pretrain_gpt.py --a 1'\nbash other.sh", ("--a", "1")),
        ("echo python pretrain_gpt.py --a 0\npython pretrain_gpt.py --a 1", ("--a", "1")),
        (
            "cat <<EOF > x\npython pretrain_gpt.py --a 0\nEOF\npython pretrain_gpt.py --a 1",
            ("--a", "1"),
        ),
        ("if true; then\n  export A=1\nfi\npython pretrain_gpt.py --a $A", ("--a", "1")),
        ("D=$(date +%s; pwd)\npython pretrain_gpt.py --a 1", ("--a", "1")),
    ],
)
def test_forms_of_shell_commands(tmp_path, text, arguments):
    assert read(tmp_path, text + "\n").arguments == arguments


def test_script_is_not_run(tmp_path):
    read(
        tmp_path,
        f"A=$(touch {tmp_path}/ran)\nB=`touch {tmp_path}/ran`\npython pretrain_gpt.py --a $A\n",
    )
    assert not (tmp_path / "ran").exists()


def test_command_line_with_and_without_a_launcher():
    launched = parse_command(["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", "--fp16"])
    assert launched.arguments == ("--fp16",)
    assert launched.world_size == 4
    bare = parse_command(["--fp16", "--save", "x"])
    assert bare.arguments == ("--fp16", "--save", "x")
    assert bare.world_size is None


def test_invalid_scripts_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="starts no training script"):
        read(tmp_path, "echo pretrain_gpt.py\npython train.py\n")
    with pytest.raises(ConfigError, match="is not closed"):
        read(tmp_path, "A='1\npython pretrain_gpt.py\n")
    with pytest.raises(ConfigError, match="cannot be read as a script"):
        read_launch_script(tmp_path / "absent.slurm")
