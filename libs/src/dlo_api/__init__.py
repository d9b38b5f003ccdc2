"""The two kinds of `dlo.dev`: models, admission rules, loading, CRD generation, topology, plan arithmetic.

Imports pydantic and yaml only. Nothing here talks to a cluster, reads the environment or looks at a disk
(except `crdgen`, which writes the generated files it is told to write).
"""
