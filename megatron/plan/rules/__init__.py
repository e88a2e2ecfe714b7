"""All rules that refuse a configuration or warn of it.

A rule is a function of a context, which has the data that the rule needs. It yields findings, which
are errors and warnings. `finding` has both, and makes rules that differ only in their fields and
texts. A rule is in the module of its subject, and `lists` has all rules of each
context. The rules of an engine and of other extras are in their packages.
"""
