"""A model of more than 1 GiB, made once: what small ones cannot show (memory, long builds)."""

from pathlib import Path

import pytest
from fakes.tiny_flux import make_tiny_flux


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 FLUX pipeline of 1.3 GiB with random weights."""
    folder = tmp_path_factory.mktemp("large") / "model"
    make_tiny_flux(folder, dtype="bfloat16", double_blocks=4, single_blocks=10, heads=12, head_dim=128)
    return folder


@pytest.fixture
def large_manifest(large_model: Path, tmp_path: Path) -> Path:
    """A manifest that serves it from two data-parallel ranks on the CPU."""
    file = tmp_path / "large.yaml"
    file.write_text(
        "apiVersion: dlo.dev/v1alpha1\n"
        "kind: DiffusionDeployment\n"
        "metadata: {name: large}\n"
        "spec:\n"
        f"  model: {{source: {{directory: {{root: models, path: {large_model.name}}}}}}}\n"
        "  engine: {device: Cpu, extraArgs: [--default-size=16x16, --default-steps=2, --max-sequence-length=16]}\n"
        "  parallelism: {data: 2}\n"
    )
    return file
