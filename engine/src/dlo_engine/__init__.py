"""The engine: a front process that serves, and ranks that stream a model's blocks from the host weight cache.

Runs with no cluster at all. Must not import the API, a Kubernetes client or a model hub, and writes no cache.
"""
