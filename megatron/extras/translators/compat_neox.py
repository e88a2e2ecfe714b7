"""Keys of the YAML files of GPT-NeoX (`python deepy.py train.py 125M.yml local_setup.yml`).

The table is `tables/gpt_neox.toml`. It is closed, and holds for these files only. A key may have
underscores or hyphens. `neox_file` reads the files, and the keys of DeepSpeed in them by the tables
of its JSON. It also reads what follows from several keys.
"""

from megatron.extras.translators.compat_row import Row, read_table

NEOX = "GPT-NeoX"
NEOX_KEYS: tuple[Row, ...] = read_table("gpt_neox")
NEOX_DEFAULTS = (
    "--hidden-dropout 0 --attention-dropout 0 --weight-decay 0.1 --no-bias-gelu-fusion "
    "--zero-stage 0"
)
"""The defaults of GPT-NeoX that differ from ours. `compat_neox_derived` has that of the warm-up."""
