"""The control plane: turns a DiffusionDeployment into cache specs and engine pods.

Must not touch a node's disk or a GPU: what it knows of them, agents and engines have reported.
"""
