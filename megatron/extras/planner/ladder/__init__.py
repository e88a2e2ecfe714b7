"""A ladder of small runs, and the loss that it foretells.

`runs` trains the rungs and collects their losses, `law` fits a law to them, and `prediction`
applies the law to a larger run.
"""
