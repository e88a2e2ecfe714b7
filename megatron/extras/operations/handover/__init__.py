"""The rehearsal of a changed run: some recorded steps are trained again and compared.

`record` reads what the run recorded, `rehearsal` trains the steps again in a scratch folder, and
`comparison` compares both. `megatron.commands.handover` prints the answer. `run_parts` belongs to a
run (`megatron.run.parts`).
"""
