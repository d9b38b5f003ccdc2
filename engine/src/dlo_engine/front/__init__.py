"""The front process: HTTP, admission, queue and supervision of the ranks. Must not import torch."""
