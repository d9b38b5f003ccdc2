"""The host weight cache: entry format, store, build, leases and layouts.

A library that a temporary folder can test: standard library, numpy, ml_dtypes and blake3; no torch, no Kubernetes.
"""
