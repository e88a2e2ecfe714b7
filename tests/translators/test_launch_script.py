"""Training commands are read from Slurm and shell scripts."""

import shlex
import sys
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.extras.interop.translators.launch_script import (
    LaunchScript,
    parse_command,
    read_launch_script,
)

SCRIPTS = Path(__file__).parents[1] / "fixtures" / "slurm"


def read(tmp_path: Path, text: str, **given) -> LaunchScript:
    path = tmp_path / "run.slurm"
    path.write_text(text)
    return read_launch_script(path, **given)


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


def test_shell_script_with_arrays_and_torchrun(monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    script = read_launch_script(SCRIPTS / "llama-arrays.sh")
    assert script.world_size == 8
    expected = shlex.split(
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --num-query-groups 2 "
        "--seq-length 1024 --normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 1408 "
        "--position-embedding-type rotary --micro-batch-size 4 --global-batch-size 64 "
        "--train-iters 1000 --lr 3e-4 --vocab-size 5000 --tensor-model-parallel-size=2 "
        f"--save '{SCRIPTS}/check points'"
    )
    assert script.arguments == tuple(expected)
    assert script.unresolved == ("EXTRA_ARGS",)


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
        # bash expands $X before it assigns.
        ("X=1 Y=2 python pretrain_gpt.py --a=$X", ("--a=",)),
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


# A comment ends with its line, whatever its last character is (BigScience's tr11-176B).
COMMENT = r"""
OUT=x
# for 20h 1190, for 100h 5990
#    --exit-duration-in-mins 1190 \
ARGS=" \
    --lr 6e-5 \
    # within quotes this is text \
    "
python pretrain_gpt.py \
    $ARGS --save $OUT
"""


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (COMMENT, "--lr 6e-5 # within quotes this is text --save x"),
        ("N=4\npython pretrain_gpt.py --a $((N * 2 + 1)) --b=$(( N>3 ? 1 : 0 ))", "--a 9 --b=1"),
        ("((N = 3 ** 2))\nlet M=N+1\npython pretrain_gpt.py --a $N", "--a 9"),
        ("python pretrain_gpt.py --a 1 &> log", "--a 1"),
        ("python pretrain_gpt.py --a 1 &>> log &\nwait", "--a 1"),
        ("python pretrain_gpt.py --a 1 2>&1 >log </dev/null", "--a 1"),
        ("python pretrain_gpt.py >log --a 1 2>log", "--a 1"),
        ("cat <<< python\npython pretrain_gpt.py --a 1\nA=2", "--a 1"),
        ('read X <<< "$Y"\npython pretrain_gpt.py --a 1\nEOF=3', "--a 1"),
        ("A=$((1 << 4))\npython pretrain_gpt.py --a $A", "--a 16"),
        ("A=\"x 'y z'\"\npython pretrain_gpt.py $A", "x|'y|z'"),
        ("A=('y z' w)\nA+=(--b 1)\npython pretrain_gpt.py \"${A[@]}\"", "y z|w|--b|1"),
        ("A='a b'\npython pretrain_gpt.py --x=$A --y=\"$A\"", "--x=a|b|--y=a b"),
        (
            "A=runs/gpt.v2\npython pretrain_gpt.py --a ${A##*/} --b ${A%.*}",
            "--a gpt.v2 --b runs/gpt",
        ),
        ("python pretrain_gpt.py --a {1,2}", "--a 1 2"),
        ("export A=1\nB=2\nbash -c 'python pretrain_gpt.py --a $A --b $B'", "--a 1 --b $B"),
        ("A=1\nbash -c \"python pretrain_gpt.py --a $A --b '\\$A'\"", "--a 1 --b $A"),
        ("C='python pretrain_gpt.py --a 1'\neval $C", "--a 1"),
        ("C='python pretrain_gpt.py --a 1'\necho $C\n$C 2>&1 | tee log", "--a 1"),
        ("run() { python pretrain_gpt.py --a $1 \"${@:2}\"; }\nrun 5 --b 'x y'", "--a|5|--b|x y"),
        ("sbatch <<EOF\n#!/bin/bash\nsrun python pretrain_gpt.py --a 1\nEOF", "--a 1"),
        ("A=<Specify path and file prefix>\npython pretrain_gpt.py --a 1", "--a 1"),
        ("ls pretrain_gpt.py\ndeepspeed --num_gpus 8 pretrain_gpt.py --a 1", "--a 1"),
        ("torchrun main_training_llama.py --model_variant=7b", "--model_variant=7b"),
        ("torchrun main_training.py --model_variant=7b", "--model_variant=7b"),
        ("python src/main.py --config src/config/wide3.yaml", "--config src/config/wide3.yaml"),
        ("python ./src/main.py --n_embd 768", "--n_embd 768"),
        ("cd src\npython main.py --n_embd 768", "--n_embd 768"),
        ("python main.py --x\npython pretrain_gpt.py --a 1", "--a 1"),
        ("case $X in\n a) A=1 ;;\n *) A=2 ;;\nesac\npython pretrain_gpt.py --a $A", "--a 2"),
    ],
)
def test_words_are_those_of_bash(tmp_path, text, arguments):
    expected = arguments.split("|") if "|" in arguments else arguments.split()
    assert read(tmp_path, text + "\n").arguments == tuple(expected)


def test_variables_come_from_the_environment(tmp_path):
    text = "B=$WORK/data\npython pretrain_gpt.py --a $B --b ${GBS:-256} $EXTRA\n"
    environment = {"WORK": "/w", "GBS": "8", "EXTRA": "--c 1"}
    found = read(tmp_path, text, environment=environment)
    assert found.arguments == ("--a", "/w/data", "--b", "8", "--c", "1")
    assert found.unresolved == ()
    assert read(tmp_path, text).unresolved == ("EXTRA", "WORK")


SOURCING = """
set -euo pipefail
SCRIPT=$(realpath "$0")
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
ROOT=$(dirname "$SCRIPT_DIR")
if [[ -f "$ROOT/lib/common.sh" ]]; then
  . "$ROOT/lib/common.sh" 8
fi
[ -f ./extra.sh ] && source ./extra.sh
source ${EXPERIMENT_DIR}/flags.sh || exit 1
source "$ROOT/lib/absent.sh"
[ -f /etc/profile ] && source /etc/profile
make_flags ${SIZES[small]}
srun python pretrain_gpt.py "${FLAGS[@]}" $MORE --save `dirname $SCRIPT`/out --load $UNSET
"""


def test_files_that_a_script_sources_are_read(tmp_path):
    folder = tmp_path / "a b" / "run"
    lib = tmp_path / "a b" / "lib"
    folder.mkdir(parents=True)
    lib.mkdir()
    (lib / "common.sh").write_text(
        "declare -A SIZES=([small]=4)\nGPUS=$1\n"
        "make_flags() { FLAGS=(--num-layers $1 --x $GPUS); }\n"
        '. "$(dirname "${BASH_SOURCE[0]}")/inner.sh"\nreturn\nMORE=--never\n'
    )
    (lib / "inner.sh").write_text("touch ran; MORE='--lr 1'\n")
    (folder / "extra.sh").write_text("MORE+=' --min-lr 0'\n")
    (folder / "flags.sh").write_text('MORE+=" --seed $(date +%s)"\n')
    script = folder / "train.sh"
    script.write_text(SOURCING)
    found = read_launch_script(script)
    assert found.arguments == (
        *(
            "--num-layers",
            "4",
            "--x",
            "8",
            "--lr",
            "1",
            "--min-lr",
            "0",
            "--seed",
            "$(date +%s)",
        ),
        *("--save", f"{folder}/out", "--load", "$UNSET"),
    )
    assert [Path(file).name for file in found.sourced] == [
        *("common.sh", "extra.sh", "flags.sh", "inner.sh"),
    ]
    assert found.unread == (
        'train.sh:11: source "$ROOT/lib/absent.sh"',
        "train.sh:12: source /etc/profile",
    )
    assert found.commands == ("$(date +%s)",)
    assert found.unresolved == ("UNSET",)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize("content", ["A='not closed", "a \ue000 b"])
def test_a_sourced_file_that_cannot_be_read_is_named_and_not_quoted(tmp_path, content):
    (tmp_path / "flags.sh").write_text(content)
    text = "source flags.sh\npython pretrain_gpt.py --seed 1\n"
    found = read(tmp_path, text)
    assert found.unread == ("run.slurm:1: source flags.sh",)
    assert found.arguments == ("--seed", "1")


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "link"])
def test_a_sourced_file_with_a_long_name_or_out_of_the_project_is_not_read(tmp_path, name):
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (tmp_path / "secrets").write_text("SEED=1")
    (folder / "link").symlink_to(tmp_path / "secrets")
    found = read(folder, f"source ./{name}\npython pretrain_gpt.py --seed $SEED\n")
    assert found.unread == (f"run.slurm:1: source ./{name}",)
    assert found.arguments == ("--seed", "$SEED")


def test_a_file_that_sources_itself_has_an_end(tmp_path):
    (tmp_path / "flags.sh").write_text("source flags.sh")
    found = read(tmp_path, "source flags.sh\npython pretrain_gpt.py --seed 1\n")
    assert found.arguments == ("--seed", "1")


def test_a_script_that_submits_itself_is_read_as_its_job(tmp_path):
    text = "#SBATCH --nodes=2\nif [ -z $SLURM_JOB_ID ]; then sbatch $0; exit; fi\n"
    found = read(tmp_path, text + "srun python pretrain_gpt.py --save x/$SLURM_JOB_ID\n")
    assert found.arguments == ("--save", "x/$SLURM_JOB_ID")
    assert found.unresolved == ("SLURM_JOB_ID",)


def test_what_is_not_known_is_named(tmp_path):
    text = (
        "D=$(date +%F)\nUNUSED=$(hostname)\nN=$(nproc)\nM=$((N * 2))\nif [ $D ]; then A=1; fi\n"
        "python pretrain_gpt.py --save x/$D --a $A --seed $1 --b $((M + 1)) --c $N\n"
    )
    found = read(tmp_path, text)
    assert found.commands == ("$((M + 1))", "$(date +%F)", "$(nproc)")
    assert found.parameters == ("1",)
    assert found.arguments == (
        *("--save", "x/$(date +%F)", "--a", "1"),
        *("--seed", "$1", "--b", "$((M + 1))", "--c", "$(nproc)"),
    )
    given = read(tmp_path, text.replace("$N", "$N $@"), parameters=["7", "--d", "x y"])
    assert given.parameters == ()
    assert given.arguments[4:6] == ("--seed", "7")
    # Without quotes $@ is split again, as in bash.
    assert given.arguments[-4:] == ("7", "--d", "x", "y")


def test_documents_that_the_script_writes(tmp_path):
    text = (
        'S=1\nJ=./ds.$S.json\ncat <<EOT > $J\n{"stage": $S, "note": "\\$S \'x\'"}\nEOT\n'
        "cat > literal.json <<'EOT'\n{\"stage\": $S}\nEOT\n"
        'echo "{\\"a\\": $S}" > c.json\n'
        "python pretrain_gpt.py --deepspeed_config $J\n"
    )
    found = read(tmp_path, text)
    assert found.arguments == ("--deepspeed_config", "./ds.1.json")
    assert found.documents["./ds.1.json"] == '{"stage": 1, "note": "$S \'x\'"}\n'
    assert found.documents["literal.json"] == '{"stage": $S}\n'
    assert found.documents["c.json"].strip() == '{"a": 1}'


CONTROL_FLOW = """
set -euo pipefail
size=${1:-small}
declare -A unused
function pick() {
    local layers=2
    case $1 in
        small) layers=4 ;;
        large | huge) layers=40 ;;
    esac
    LAYERS=$layers
}
pick "$size"
if [[ $size == small && -z ${DEBUG:-} ]]; then LR=3e-4; else LR=1e-4; fi
for path in a b c; do DATA="${DATA:-} 0.5 $path"; done
i=0
while (( i < 3 )); do i=$((i + 1)); done
if [ $# -gt 2 ]; then
    echo "usage" >&2
    exit 1
fi
[ -f never.json ] && LR=0
mkdir -p out || exit 3
(cd out && touch x)
torchrun --nproc_per_node 8 --nnodes=2 pretrain_gpt.py --num-layers $LAYERS --lr $LR \\
    --data-path $DATA --seed $i --save "runs/$(date +%F)" "${@:2}" 2>&1 | tee out/log
"""


def test_control_flow_is_followed(tmp_path):
    small = read(tmp_path, CONTROL_FLOW)
    assert small.arguments == (
        *("--num-layers", "4", "--lr", "3e-4", "--data-path", "0.5", "a", "0.5", "b", "0.5", "c"),
        *("--seed", "3", "--save", "runs/$(date +%F)"),
    )
    assert small.world_size == 16
    assert small.commands == ("$(date +%F)",)
    large = read(tmp_path, CONTROL_FLOW, parameters=["large", "--fp16"])
    assert large.arguments[:4] == ("--num-layers", "40", "--lr", "1e-4")
    assert large.arguments[-1] == "--fp16"
    debug = read(tmp_path, CONTROL_FLOW, environment={"DEBUG": "1"})
    assert debug.arguments[2:4] == ("--lr", "1e-4")
    with pytest.raises(ConfigError, match=r"run.slurm:\d+: the script ends here \(exit\)"):
        read(tmp_path, CONTROL_FLOW, parameters=["1", "2", "3"])
    assert list(tmp_path.iterdir()) == [tmp_path / "run.slurm"]


def test_quoted_command_lines_are_followed(tmp_path):
    text = (
        "#SBATCH --nodes=3\n#SBATCH --gres=gpu:8\nexport LR=1e-4\n"
        "CMD=\"pretrain_gpt.py --lr $LR --tokenizer 'a b' --nodes $SLURM_NNODES\"\n"
    )
    double = read(tmp_path, text + 'srun bash -c "python $CMD"\n')
    assert double.arguments == ("--lr", "1e-4", "--tokenizer", "a b", "--nodes", "3")
    assert double.world_size == 24
    single = read(tmp_path, text + "export CMD\nsrun bash -c 'python $CMD' 2>&1 | tee log\n")
    assert single.arguments == ("--lr", "1e-4", "--tokenizer", "'a", "b'", "--nodes", "3")


@pytest.mark.parametrize(
    "guard",
    [
        "if [ ! -f $P ]; then echo none >&2; exit 1; fi",
        "if [[ ! -e $P || ! -d /data ]]; then exit 1; fi",
        "if ! [ -f $P ]; then exit 1; fi",
        "if [ -f $P ]; then :; else exit 1; fi",
        "[ -s $P ] || exit 1",
        "test -r $P || { echo none; exit 1; }",
        "[[ ! -f $P ]] && exit 1",
        "die() { echo none; exit 1; }; [ -f $P ] || die x",
    ],
)
def test_file_that_a_script_needs_is_assumed_to_exist(tmp_path, guard):
    found = read(tmp_path, f"P=/data/x\n{guard}\npython pretrain_gpt.py --seed 1\n")
    assert found.arguments == ("--seed", "1")
    assert "$P" in found.assumed_files


@pytest.mark.parametrize(
    "other",
    [
        "if [ -f done ]; then exit 0; fi",
        "if [ -f latest ]; then SEED=2; fi",
        "if [ -f latest ]; then SEED=2; else if [ $SEED = 3 ]; then exit 1; fi; fi",
        "[ -f latest ] && SEED=2",
    ],
)
def test_files_that_a_script_does_not_need_are_absent(tmp_path, other):
    found = read(tmp_path, f"SEED=1\n{other}\npython pretrain_gpt.py --seed $SEED\n")
    assert found.arguments == ("--seed", "1")
    assert found.assumed_files == ()


def test_unset_variables_stay_as_written_unless_they_are_tested(tmp_path):
    found = read(
        tmp_path,
        'if [ -z "$STAGES" ]; then PIPE=; else PIPE="--pipeline $STAGES"; fi\n'
        "N=$COUNT\nTOTAL=$((N * 2))\nNEVER_SET_HERE=1\nunset NEVER_SET_HERE\n"
        'OPTIONS="--save $ROOT/x $EXTRA"\n'
        "python pretrain_gpt.py --seed $TOTAL --load ${ROOT} $OPTIONS $PIPE $NEVER_SET_HERE\n",
    )
    assert found.arguments == ("--seed", "0", "--load", "$ROOT", "--save", "$ROOT/x")
    assert found.unresolved == ("EXTRA", "ROOT")
    assert set(found.tested) == {"COUNT"}


def test_placeholders_are_words(tmp_path):
    text = (
        "SAVE=<Specify path>\nDATA=<Specify path and prefix>_text_document # here\n"
        'VOCAB="<path to file>/vocab.json"\n'
        "python pretrain_gpt.py --save $SAVE --data-path $DATA --vocab-file $VOCAB \\\n"
        "    --load <your folder> --eod '<pad>' < input > output\n"
    )
    found = read(tmp_path, text)
    assert found.arguments == (
        *("--save", "<Specify path>", "--data-path", "<Specify path and prefix>_text_document"),
        *("--vocab-file", "<path to file>/vocab.json", "--load", "<your folder>"),
        *("--eod", "<pad>"),
    )
    assert len(found.placeholders) == 4


def test_options_in_one_word_are_split(tmp_path):
    script = read(tmp_path, 'A="--seed 1 --lr 2"\nmpirun run pretrain_gpt.py "$A --fp16 "\n')
    assert script.arguments == ("--seed", "1", "--lr", "2", "--fp16")


def test_loop_that_starts_training_is_named(tmp_path):
    text = "for s in 1 2; do\n  python pretrain_gpt.py --seed $s\ndone\n"
    assert read(tmp_path, text).loop == "for s in 1 2"
    nested = f"while true; do\n{text}done\n"
    assert read(tmp_path, nested).loop == "while true"
    before = "for s in 1 2; do :; done\n"
    assert read(tmp_path, before + "python pretrain_gpt.py --seed $s\n").loop == ""


def test_slurm_sets_what_the_header_asks_for(tmp_path):
    header = "#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node=2\n"
    script = read(tmp_path, header + "python pretrain_gpt.py --tp $SLURM_GPUS_PER_NODE\n")
    assert script.arguments == ("--tp", "4")


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


@pytest.fixture
def usual_recursion_limit():
    """Set Python's default, because packages that other tests import may have raised it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def test_deep_nesting_is_an_error(tmp_path, usual_recursion_limit):
    nested = "${a:-" * 990 + "x" + "}" * 990
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(tmp_path, f"python pretrain_gpt.py --seed {nested}\n")


def test_shell_follows_deep_nesting(tmp_path):
    nested = "${a:-" * 150 + "x" + "}" * 150
    script = read(tmp_path, f"python pretrain_gpt.py --seed {nested}\n")
    assert script.arguments == ("--seed", "x")


def test_private_characters_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"U\+E000"):
        read(tmp_path, "python pretrain_gpt.py --seed \ue0005\ue001\n")


def test_a_check_of_a_variable_leaves_it_as_it_is_written(tmp_path):
    """`${NAME:?message}` ends bash, but the variable may be set where the script will run."""
    (tmp_path / "environment").write_text(': "${WORK:?is not set}"\nLAYERS=${LAYERS:?}\n')
    script = tmp_path / "train.sh"
    script.write_text(
        "set -eu\ncd $(dirname $0)\nsource ./environment\n"
        "python pretrain_gpt.py --num-layers $LAYERS --data-path $WORK/text --save ${OUT?}\n"
    )
    found = read_launch_script(script, environment={"LAYERS": "12"})
    assert value_of(found.arguments, "--num-layers") == "12"
    assert value_of(found.arguments, "--data-path") == "$WORK/text"
    assert value_of(found.arguments, "--save") == "$OUT"
