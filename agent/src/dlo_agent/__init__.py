"""The node agent: builds, verifies, warms and evicts cache entries on its own node, and reports them.

Must not import torch or kopf, and fetches nothing that a pod asks for. The work loop arrives with the cluster
release; the import walls hold from the first line.
"""
