"""The node agent: builds, verifies, warms and evicts cache entries on its own node, and reports them.

`python -m dlo_agent run` is the agent, `gate` waits for an engine's entries, `init-root` makes a cache root.
Must not import torch or kopf, and fetches nothing that a pod asks for.
"""
