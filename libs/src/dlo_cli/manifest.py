"""A manifest on this machine: read, refused with the API server's words where it must be, and its model opened."""

from pathlib import Path

from dlo_api.load import load_manifest
from dlo_api.unbuilt import check_built
from dlo_api.v1alpha1 import DiffusionDeployment
from dlo_api.yamldoc import MAX_BYTES

from dlo_cli.errors import UsageError
from dlo_cli.model import Model, locate, open_model


def read_manifest(file: Path) -> DiffusionDeployment:
    """The manifest in a file. Raises UsageError, or the errors of `dlo_api` that list every problem."""
    try:
        with file.open("rb") as stream:
            # One byte more than a manifest may have: endless files end here, and the reader names the limit.
            text = stream.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"{file}: cannot be read: {reason}", hint="name a manifest with -f", code="ManifestUnreadable"
        ) from error
    return load_manifest(text, str(file))


def open_manifest_model(
    manifest: DiffusionDeployment, file: Path, roots: dict[str, Path], layout: Path | None
) -> Model:
    """The model of a manifest. Raises also what is admitted but not built, and sizes that do not divide."""
    spec = manifest.spec
    check_built(spec, file=str(file))
    directory = spec.model.source.directory
    if directory is None:
        raise UsageError("spec.model.source: only a directory can be used without a cluster")
    if spec.model.layout and layout is None:
        raise UsageError(
            f"spec.model.layout: {spec.model.layout!r} is a name from a cluster's Helm values",
            hint="give the layout's file with --layout FILE",
            code="UnknownLayout",
        )
    folder = locate(directory, file, roots)
    model = open_model(folder, spec.model.components, variant=spec.model.variant, layout_file=layout)
    for streamed in model.streamed:
        streamed.layout.check(streamed.component.config, spec.parallelism.tensor)
    return model
