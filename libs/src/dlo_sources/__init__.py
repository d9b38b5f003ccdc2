"""Where checkpoint bytes come from: folders in the diffusers form, their tensors, and the digests of their files.

``pipeline.open_directory`` is the way in. Nothing here writes to a cache root but the digest records.
"""
