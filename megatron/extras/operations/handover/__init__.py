"""The rehearsal of a changed run: some recorded steps are trained again and compared.

`record` reads what the run recorded, `rehearsal` trains the steps again in a scratch folder,
`comparison` compares both, and `report` prints the answer. `perturbation` and `installation` are
parts of a run (`megatron.run.parts`).
"""
