"""The control plane: turns a DiffusionDeployment into cache specs and engine pods.

Must not touch a node's disk or a GPU. The reconcile loop arrives with the cluster release; the import walls hold
from the first line.
"""
