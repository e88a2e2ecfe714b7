"""Other trainers' flags, configuration files and launch scripts.

`translator` is what a command line is read with. `compat` has the tables of flags, one `compat_*`
file for each trainer. `deepspeed_json` reads DeepSpeed's JSON, `neox_file` the YAML of GPT-NeoX,
and `launch_script` finds the training command in a script.
"""
